"""Steps down and up a gradient, row by row on `[S, P]`: what is inside the clip and what is not is said here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fedman.algorithms.base import Local


def norm(g: Tensor) -> Tensor:
    """‖g‖₂ of every row, `[S, 1]`."""
    return g.norm(dim=-1, keepdim=True)


def clip_factor(g: Tensor, bound: float) -> Tensor:
    """min(1, C / (‖g‖₂ + 1e-6)) of every row, `[S, 1]`: clip(g) = g · clip_factor(g)."""
    return (bound / (norm(g) + 1e-6)).clamp(max=1)


def sgd(w: Tensor, g: Tensor, hp: Local, extra_decay: Tensor | float = 0.0) -> Tensor:
    """w − η(clip(g) + (λ + extra)·w): `g` is inside the clip, weight decay outside it."""
    if hp.fused is not None:
        return hp.fused.clip_update(w, g, hp.lr, hp.clip, hp.decay, extra_decay)
    shrunk = w * (1 - hp.lr * (hp.decay + extra_decay))
    return shrunk.addcmul_(g, -hp.lr * clip_factor(g, hp.clip))  # two passes over [S, P] instead of five


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
