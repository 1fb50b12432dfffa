"""The local optimisers by name; the first is the default. A new one is a file in this folder and a line here."""

from __future__ import annotations

from fedman.optimizers.adam import Adam, AdamW
from fedman.optimizers.base import Descent, Fused, LocalOptimizer, Rates, State, clip_factor, norm
from fedman.optimizers.sgd import SGD
from fedman.parts import Registry

OPTIMIZERS = Registry(
    "optimizer",
    LocalOptimizer,  # type: ignore[type-abstract]
    {"sgd": SGD, "adam": Adam, "adamw": AdamW},
)

__all__ = ["OPTIMIZERS", "SGD", "Adam", "AdamW", "Descent", "Fused", "LocalOptimizer", "Rates", "State", "clip_factor",
           "norm"]  # fmt: skip
