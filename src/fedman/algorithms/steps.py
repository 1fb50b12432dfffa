"""Steps down and up a gradient, row by row on `[S, P]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedman.optimizers.base import clip_factor, norm

if TYPE_CHECKING:
    from torch import Tensor

    from fedman.algorithms.base import Local

__all__ = ["climb", "clip_factor", "descend", "norm"]


def descend(w: Tensor, g: Tensor, hp: Local, extra_decay: Tensor | float = 0.0) -> Tensor:
    """A step of the local optimiser along −g; by default w − η(clip(g) + (λ + extra)·w).

    `g` is inside the clip; what an algorithm adds to the weight decay is outside it.
    """
    return hp.descent(w, g, hp, extra_decay)


def climb(
    w: Tensor, s: Tensor, rho: Tensor | float, hp: Local, eps: float = 1e-16, eta: Tensor | float | None = None
) -> Tensor:
    """w + e with e = ρ·T²s / (‖T s‖₂ + ε): the point uphill from which SAM-type methods look back.

    T = 1; with η_a (`eta`): T = |w| + η_a for weights and 1 for biases, a scale of its own for every weight.
    """
    if hp.fused is not None:
        return hp.fused.climb(w, s, rho, eps, eta, hp.is_weight)
    if eta is None:
        return w + s * (rho / (norm(s) + eps))
    T = (w.abs() + eta).where(hp.is_weight, 1)
    Ts = T * s
    return w + T * Ts * (rho / (norm(Ts) + eps))
