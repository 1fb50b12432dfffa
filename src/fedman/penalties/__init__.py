"""Penalties by name: terms added to a client's loss. The first, MAN, is the paper's and the default.

A new one is a file in this folder and a line here. This module imports without torch.
"""

from __future__ import annotations

from fedman.parts import Registry
from fedman.penalties.activation_norms import MAN, ActivationL1, HiddenMAN, LogitsMAN, mean_squares_of
from fedman.penalties.base import Penalty, Terms, attach, check_terms
from fedman.penalties.feddecorr import FedDecorr

PENALTIES = Registry(
    "penalty",
    Penalty,  # type: ignore[type-abstract]
    {
        "man": MAN,
        "man-hidden": HiddenMAN,
        "man-logits": LogitsMAN,
        "activation-l1": ActivationL1,
        "feddecorr": FedDecorr,
    },
    plural="penalties",
)

__all__ = [
    "MAN",
    "PENALTIES",
    "ActivationL1",
    "FedDecorr",
    "HiddenMAN",
    "LogitsMAN",
    "Penalty",
    "Terms",
    "attach",
    "check_terms",
    "mean_squares_of",
]
