"""FedASAM. Caldarola et al., 'Improving Generalization in Federated Learning by Seeking Flat Minima', 2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Algorithm, Grad, Local, State
from fedman.algorithms.steps import climb, descend
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedASAM(Algorithm):
    """FedSAM on a scale of its own for every weight: T = |w| + η_a for weights, 1 for biases.

    e = ρ·T²s / ‖T s‖ with s = ∇F(w); then w ← w − η(clip(∇F(w + e)) + λw). Server as FedAvg.
    """

    title = "FedASAM"
    weighted = True
    gradients_per_step = 2

    rho: float = hyperparameter(0.5, "ρ, length of the ascent")
    eta: float = hyperparameter(0.2, "η_a, added to |w| in the scale of a weight")

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        return descend(w, grad(climb(w, grad(w), self.rho, hp, eta=self.eta)), hp)
