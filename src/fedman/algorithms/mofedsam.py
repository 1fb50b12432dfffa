"""MoFedSAM. Qu et al., 'Generalized Federated Learning via Sharpness Aware Minimization', 2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Grad, Local, State
from fedman.algorithms.fedcm import FedCM
from fedman.algorithms.steps import climb
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MoFedSAM(FedCM):
    """FedCM with its gradient taken a step of length ρ uphill, as in SAM; ρ = 0 is FedCM.

    Per batch: e = ρ·s/‖s‖ with s = ∇F(w); then w ← w − η(clip(α∇F(w + e) + (1 − α)d) + λw). The rest as FedCM.
    """

    title = "MoFedSAM"
    gradients_per_step = 2

    rho: float = hyperparameter(0.1, "ρ, length of the ascent")

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        return super().step(w, lambda w: grad(climb(w, grad(w), self.rho, hp, eps=1e-7)), server, client, hp)
