"""FedLESAM. Fan et al., 'Locally Estimated Global Perturbations are Better than Local Perturbations for Federated
Sharpness-aware Minimization', 2024."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Algorithm, Grad, Local, State
from fedman.algorithms.steps import descend, norm
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedLESAM(Algorithm):
    """SAM with one gradient a step: the ascent is against the way the server's model has gone; ρ = 0 is FedAvg with a
    plain mean.

    Once a round: e = ρ·(θ_k − θ)/‖θ_k − θ‖, with θ_k the model that client k was sent when it last took part; no e at
    its first time. Step: w ← w − η(clip(∇F(w + e)) + λw). Server: θ ← mean_S x_k.

    `last_round` takes the server's model of the round before for θ_k, for all clients alike.
    """

    title = "FedLESAM"
    server = ("w", "before")
    client = ("before",)

    rho: float = hyperparameter(0.1, "ρ, length of the ascent")
    last_round: bool = hyperparameter(False, "ascend against the server's last step, for all clients alike")

    def begin(self, server: State, client: State, hp: Local) -> State:
        return {"e": ascent(server if self.last_round else client, server["w"], self.rho).expand(len(hp.p), -1)}

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        return descend(w, grad(w + client["e"]), hp)

    def finish(self, w: Tensor, server: State, client: State, hp: Local) -> tuple[State, State]:
        return {"before": server["w"].expand_as(w)}, {"w": w}

    def update(self, server: State, mean: State, fraction: float) -> State:
        return {"w": mean["w"], "before": server["w"]}


def ascent(memory: State, theta: Tensor, rho: float) -> Tensor:
    """e = ρ·(before − θ)/‖before − θ‖; zero where nothing is remembered, which all zeros mean."""
    before = memory["before"]
    way = (before - theta).where((before != 0).any(-1, keepdim=True), 0)
    return way * (rho / (norm(way) + 1e-7))
