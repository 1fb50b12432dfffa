"""FedAvg. McMahan et al., 'Communication-Efficient Learning of Deep Networks from Decentralized Data', 2017."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Algorithm, Grad, Local, State
from fedman.algorithms.steps import descend

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Step: w ← w − η(clip(∇F(w)) + λw). Server: θ ← Σ_S n_k x_k / Σ_S n_k."""

    title = "FedAvg"
    weighted = True

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        return descend(w, grad(w), hp)
