"""The algorithms by name; the first is the default. A new one is a file in this folder and a line here."""

from __future__ import annotations

from fedman.algorithms.base import Algorithm, Grad, Local, Scratch
from fedman.algorithms.fedasam import FedASAM
from fedman.algorithms.fedavg import FedAvg
from fedman.algorithms.feddc import FedDC
from fedman.algorithms.feddyn import FedDyn
from fedman.algorithms.fedprox import FedProx
from fedman.algorithms.fedsam import FedSAM
from fedman.algorithms.fedspeed import FedSpeed
from fedman.algorithms.scaffold import Scaffold
from fedman.algorithms.steps import climb, clip_factor, descend, norm
from fedman.optimizers import Fused, State
from fedman.parts import Registry, hyperparameter, hyperparameters

ALGORITHMS = Registry(
    "algorithm",
    Algorithm,  # type: ignore[type-abstract]
    {
        "fedavg": FedAvg,
        "fedsam": FedSAM,
        "fedasam": FedASAM,
        "feddyn": FedDyn,
        "feddc": FedDC,
        "fedspeed": FedSpeed,
        "fedprox": FedProx,
        "scaffold": Scaffold,
    },
)

__all__ = ["ALGORITHMS", "Algorithm", "Fused", "Grad", "Local", "Scratch", "State", "climb", "clip_factor", "descend",
           "hyperparameter", "hyperparameters", "norm"]  # fmt: skip
