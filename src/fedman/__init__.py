"""fedman: federated learning that lands in flatter minima, by minimising layerwise activation norms (MAN)."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedman.errors import Diverged, StopRun, UserError
from fedman.trackers import Tracker

# Large tensors on a CPU in huge pages: the kernel clears every new page, which small ones make slow.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch reads it when it makes its first tensor

if TYPE_CHECKING:
    from fedman import data
    from fedman.aggregation import Aggregation, Krum, Mean, Median, MultiKrum, NormClip, TrimmedMean
    from fedman.algorithms import (
        Algorithm,
        FedACG,
        FedAdam,
        FedASAM,
        FedAvg,
        FedAvgM,
        FedCM,
        FedDC,
        FedDyn,
        FedGAMMA,
        FedGloSS,
        FedLESAM,
        FedLESAMD,
        FedProx,
        FedSAM,
        FedSMOO,
        FedSpeed,
        MoFedSAM,
        Scaffold,
        descend,
        hyperparameter,
    )
    from fedman.api import (
        Result,
        list_aggregations,
        list_algorithms,
        list_attacks,
        list_datasets,
        list_models,
        list_optimizers,
        list_penalties,
        list_presets,
        list_tasks,
        run,
    )
    from fedman.optimizers import SGD, Adam, AdamW, LocalOptimizer
    from fedman.penalties import MAN, ActivationL1, FedDecorr, HiddenMAN, LogitsMAN, Penalty
    from fedman.penalties.man import ActivationNorm
    from fedman.tasks import Classification, LanguageModel, MultiLabel, Regression, Task
    from fedman.training.attacks import Attack, Collusion, Hostile, LabelFlip, Scaled, SignFlip

    __version__: str

_LAZY = {
    "fedman.api": (
        "Result list_aggregations list_algorithms list_attacks list_datasets list_models list_optimizers "
        "list_penalties list_presets list_tasks run"
    ),
    "fedman.aggregation": "Aggregation Krum Mean Median MultiKrum NormClip TrimmedMean",
    "fedman.algorithms": (
        "Algorithm FedACG FedASAM FedAdam FedAvg FedAvgM FedCM FedDC FedDyn FedGAMMA FedGloSS FedLESAM FedLESAMD "
        "FedProx FedSAM FedSMOO FedSpeed MoFedSAM Scaffold descend hyperparameter"
    ),
    "fedman.optimizers": "SGD Adam AdamW LocalOptimizer",
    "fedman.penalties": "MAN ActivationL1 FedDecorr HiddenMAN LogitsMAN Penalty",
    "fedman.penalties.man": "ActivationNorm",
    "fedman.tasks": "Classification LanguageModel MultiLabel Regression Task",
    "fedman.training.attacks": "Attack Collusion Hostile LabelFlip Scaled SignFlip",
}
_HOME = {name: module for module, names in _LAZY.items() for name in names.split()}

__all__ = [
    "MAN",
    "SGD",
    "ActivationL1",
    "ActivationNorm",
    "Adam",
    "AdamW",
    "Aggregation",
    "Algorithm",
    "Attack",
    "Classification",
    "Collusion",
    "Diverged",
    "FedACG",
    "FedASAM",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedCM",
    "FedDC",
    "FedDecorr",
    "FedDyn",
    "FedGAMMA",
    "FedGloSS",
    "FedLESAM",
    "FedLESAMD",
    "FedProx",
    "FedSAM",
    "FedSMOO",
    "FedSpeed",
    "HiddenMAN",
    "Hostile",
    "Krum",
    "LabelFlip",
    "LanguageModel",
    "LocalOptimizer",
    "LogitsMAN",
    "Mean",
    "Median",
    "MoFedSAM",
    "MultiKrum",
    "MultiLabel",
    "NormClip",
    "Penalty",
    "Regression",
    "Result",
    "Scaffold",
    "Scaled",
    "SignFlip",
    "StopRun",
    "Task",
    "Tracker",
    "TrimmedMean",
    "UserError",
    "__version__",
    "data",
    "descend",
    "hyperparameter",
    "list_aggregations",
    "list_algorithms",
    "list_attacks",
    "list_datasets",
    "list_models",
    "list_optimizers",
    "list_penalties",
    "list_presets",
    "list_tasks",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for, so that the command line starts at once."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name == "data":
        return import_module("fedman.data")
    if name == "__version__":
        return import_module("fedman.runs.version").release()
    raise AttributeError(f"module 'fedman' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__") and name not in __all__)]
