"""fedman: federated learning that lands in flat minima, by minimising layerwise activation norms (MAN)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedman.errors import Diverged, UserError

if TYPE_CHECKING:
    from fedman.api import run
    from fedman.penalties.man import ActivationNorm

__all__ = ["ActivationNorm", "Diverged", "UserError", "run"]


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for, so that the command line starts at once."""
    if name == "run":
        from fedman.api import run

        return run
    if name == "ActivationNorm":
        from fedman.penalties.man import ActivationNorm

        return ActivationNorm
    raise AttributeError(f"module 'fedman' has no attribute {name!r}")
