"""FedSAM. Qu et al., 'Generalized Federated Learning via Sharpness Aware Minimization', 2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Algorithm, Grad, Local, State
from fedman.algorithms.steps import climb, descend
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedSAM(Algorithm):
    """Per batch: e = ρ·s/‖s‖ with s = ∇F(w); then w ← w − η(clip(∇F(w + e)) + λw). Server as FedAvg."""

    title = "FedSAM"
    weighted = True
    gradients_per_step = 2

    rho: float = hyperparameter(0.05, "ρ, length of the ascent")

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        return descend(w, grad(climb(w, grad(w), self.rho, hp)), hp)
