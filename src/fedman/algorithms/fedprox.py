"""FedProx. Li et al., 'Federated Optimization in Heterogeneous Networks', 2020."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Algorithm, Grad, Local, State
from fedman.algorithms.steps import descend
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedProx(Algorithm):
    """Step: w ← w − η(clip(∇F(w) + μ(w − θ)) + λw). Server as FedAvg."""

    title = "FedProx"
    weighted = True

    mu: float = hyperparameter(1e-4, "μ, weight of the proximal term")

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        return descend(w, grad(w) + self.mu * (w - server["w"]), hp)
