"""FedLESAM-D. Fan et al., 'Locally Estimated Global Perturbations are Better than Local Perturbations for Federated
Sharpness-aware Minimization', 2024."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Grad, Local, Scratch, State
from fedman.algorithms.feddyn import FedDyn
from fedman.algorithms.fedlesam import ascent
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedLESAMD(FedDyn):
    """FedDyn with its gradient taken at FedLESAM's ascent e; ρ = 0 is FedDyn.

    Step: w ← w − η(clip(∇F(w + e) + α_k(h_k − θ)) + (λ + α_k)w), with e = ρ·(θ_k − θ)/‖θ_k − θ‖ and θ_k the model that
    client k was sent when it last took part; no e at its first time. The rest as FedDyn.

    `last_round` takes the server's model of the round before for θ_k, for all clients alike.
    """

    title = "FedLESAM-D"
    server = ("w", "h", "before")
    client = ("h", "before")

    alpha: float = hyperparameter(0.1, "α, weight of the quadratic term")
    rho: float = hyperparameter(0.1, "ρ, length of the ascent")
    last_round: bool = hyperparameter(False, "ascend against the server's last step, for all clients alike")

    def begin(self, server: State, client: State, hp: Local) -> State:
        e = ascent(server if self.last_round else client, server["w"], self.rho)
        return {**super().begin(server, client, hp), "e": e.expand(len(hp.p), -1)}

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor | Scratch:
        return super().step(w, lambda w: grad(w + client["e"]), server, client, hp)

    def finish(self, w: Tensor, server: State, client: State, hp: Local) -> tuple[State, State]:
        memory, upload = super().finish(w, server, client, hp)
        return {**memory, "before": server["w"].expand_as(w)}, upload

    def update(self, server: State, mean: State, fraction: float) -> State:
        return {**super().update(server, mean, fraction), "before": server["w"]}
