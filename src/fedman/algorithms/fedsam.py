"""FedSAM. Qu et al., 'Generalized Federated Learning via Sharpness Aware Minimization', 2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Algorithm, Grad, Local, State, ascent, sgd

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedSAM(Algorithm):
    """Per batch: e = ρ·s/‖s‖ with s = ∇F(w); then w ← w − η(clip(∇F(w + e)) + λw). Server as FedAvg."""

    title = "FedSAM"
    weighted = True

    rho: float = 0.05

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        e = ascent(grad(w), self.rho)
        return sgd(w, grad(w + e), hp)
