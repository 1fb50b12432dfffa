"""FedDyn. Acar et al., 'Federated Learning Based on Dynamic Regularization', 2021."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedman.algorithms.base import Algorithm, Grad, Local, Scratch, State
from fedman.algorithms.steps import descend
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """Local objective F(w) + α_k⟨w, h_k − θ⟩ + (α_k/2)‖w‖², with α_k = α/p_k.

    Step: w ← w − η(clip(∇F(w) + α_k(h_k − θ)) + (λ + α_k)w): the quadratic acts as weight decay, outside the
    clip. After: h_k ← h_k + (w − θ). Server: θ ← mean_S x_k + h with h = (1/N) Σ_all h_k, kept as a running sum.
    """

    title = "FedDyn"
    server: ClassVar[tuple[str, ...]] = ("w", "h")
    client: ClassVar[tuple[str, ...]] = ("h",)

    alpha: float = hyperparameter(0.01, "α, weight of the quadratic term")

    def begin(self, server: State, client: State, hp: Local) -> State:
        return {"pull": self.alpha / hp.p * (client["h"] - server["w"])}

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor | Scratch:
        return descend(w, grad(w) + client["pull"], hp, extra_decay=self.alpha / hp.p)

    def finish(self, w: Tensor, server: State, client: State, hp: Local) -> tuple[State, State]:
        drift = w - server["w"]
        return {"h": client["h"] + drift}, {"w": w, "h": drift}

    def update(self, server: State, mean: State, fraction: float) -> State:
        h = server["h"] + fraction * mean["h"]
        return {"w": mean["w"] + h, "h": h}

    def extra_decay(self, p: float) -> float:
        return self.alpha / p
