"""fedman: federated learning that lands in flat minima, by minimising layerwise activation norms (MAN)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedman.errors import Diverged, UserError

if TYPE_CHECKING:
    from fedman.api import run
    from fedman.penalties.man import ActivationNorm

__all__ = ["ActivationNorm", "Diverged", "UserError", "run"]
_MODULES = {"run": "fedman.api", "ActivationNorm": "fedman.penalties.man"}


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for, so that the command line starts at once."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fedman' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
