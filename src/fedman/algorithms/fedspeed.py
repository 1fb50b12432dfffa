"""FedSpeed. Sun et al., 'FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization
Accuracy', 2023."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Grad, Local, Scratch, State
from fedman.algorithms.feddyn import FedDyn
from fedman.algorithms.steps import climb, clip_factor, descend
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedSpeed(FedDyn):
    """FedDyn with its gradient taken a step of length ρ uphill, as in SAM; ρ = 0 is FedDyn.

    Per batch: e = ρ·s/‖s‖ with s = ∇F(w); then
    w ← w − η(clip(∇F(w + e) + α_k(h_k − θ)) + (λ + α_k)w). The rest as FedDyn.

    `stale_ascent` reproduces the MAN authors' code, which does not clear the gradient before the ascent:
    s = ∇F(w) + G, with G the clipped total gradient of the client's previous step (0 at its first).
    """

    title = "FedSpeed"
    gradients_per_step = 2

    rho: float = hyperparameter(0.1, "ρ, length of the ascent")
    stale_ascent: bool = hyperparameter(False, "keep the last gradient in the ascent, as in the MAN authors' code")

    @property
    def scratch(self) -> tuple[str, ...]:
        return ("G",) if self.stale_ascent else ()

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor | Scratch:
        s = grad(w) + client["G"] if self.stale_ascent else grad(w)
        g = grad(climb(w, s, self.rho, hp, eps=1e-7)) + client["pull"]
        w = descend(w, g, hp, extra_decay=self.alpha / hp.p)
        return (w, {"G": g * clip_factor(g, hp.clip)}) if self.stale_ascent else w
