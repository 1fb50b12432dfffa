"""The algorithms by name; the first is the default. A new one is a file in this folder and a line here."""

from __future__ import annotations

from fedman.algorithms.base import Algorithm, Grad, Local, Scratch
from fedman.algorithms.fedacg import FedACG
from fedman.algorithms.fedadam import FedAdam
from fedman.algorithms.fedasam import FedASAM
from fedman.algorithms.fedavg import FedAvg
from fedman.algorithms.fedavgm import FedAvgM
from fedman.algorithms.fedcm import FedCM
from fedman.algorithms.feddc import FedDC
from fedman.algorithms.feddyn import FedDyn
from fedman.algorithms.fedgamma import FedGAMMA
from fedman.algorithms.fedgloss import FedGloSS
from fedman.algorithms.fedlesam import FedLESAM
from fedman.algorithms.fedlesamd import FedLESAMD
from fedman.algorithms.fedprox import FedProx
from fedman.algorithms.fedsam import FedSAM
from fedman.algorithms.fedsmoo import FedSMOO
from fedman.algorithms.fedspeed import FedSpeed
from fedman.algorithms.mofedsam import MoFedSAM
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
        "fedavgm": FedAvgM,
        "fedadam": FedAdam,
        "fedcm": FedCM,
        "mofedsam": MoFedSAM,
        "fedgamma": FedGAMMA,
        "fedsmoo": FedSMOO,
        "fedlesam": FedLESAM,
        "fedlesam-d": FedLESAMD,
        "fedacg": FedACG,
        "fedgloss": FedGloSS,
    },
)

__all__ = ["ALGORITHMS", "Algorithm", "Fused", "Grad", "Local", "Scratch", "State", "climb", "clip_factor", "descend",
           "hyperparameter", "hyperparameters", "norm"]  # fmt: skip
