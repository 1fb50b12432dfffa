"""FedGAMMA. Dai et al., 'FedGAMMA: Federated Learning with Global Sharpness-Aware Minimization', 2023."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Grad, Local, State
from fedman.algorithms.scaffold import Scaffold
from fedman.algorithms.steps import climb
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedGAMMA(Scaffold):
    """SCAFFOLD with its gradient taken a step of length ρ uphill, as in SAM; ρ = 0 is SCAFFOLD.

    Per batch: e = ρ·s/‖s‖ with s = ∇F(w); then w ← w − η(clip(∇F(w + e) + c/p_k − c_k) + λw).
    After: c_k ← c_k − c + (θ − w)/(K·η), by default with the round's own η. Server as SCAFFOLD.
    """

    title = "FedGAMMA"
    gradients_per_step = 2

    decayed: bool = hyperparameter(True, "control states with the decayed learning rate")
    rho: float = hyperparameter(0.1, "ρ, length of the ascent")

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        return super().step(w, lambda w: grad(climb(w, grad(w), self.rho, hp, eps=1e-7)), server, client, hp)
