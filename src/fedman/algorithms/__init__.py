"""The algorithms by name. A new one is a file beside this and a line here."""

from __future__ import annotations

from dataclasses import fields

from fedman.algorithms.base import Algorithm, Fused, Local, State
from fedman.algorithms.fedasam import FedASAM
from fedman.algorithms.fedavg import FedAvg
from fedman.algorithms.feddc import FedDC
from fedman.algorithms.feddyn import FedDyn
from fedman.algorithms.fedprox import FedProx
from fedman.algorithms.fedsam import FedSAM
from fedman.algorithms.fedspeed import FedSpeed
from fedman.algorithms.scaffold import Scaffold

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedsam": FedSAM,
    "fedasam": FedASAM,
    "feddyn": FedDyn,
    "feddc": FedDC,
    "fedspeed": FedSpeed,
    "fedprox": FedProx,
    "scaffold": Scaffold,
}


def hyperparameters(name: str) -> dict[str, float | bool]:
    """The hyper-parameters of an algorithm and their defaults: {"alpha": 0.01, ...}."""
    return {f.name: f.default for f in fields(ALGORITHMS[name])}  # type: ignore[misc]


__all__ = ["ALGORITHMS", "Algorithm", "Fused", "Local", "State", "hyperparameters"]
