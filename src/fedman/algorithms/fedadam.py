"""FedAdam. Reddi et al., 'Adaptive Federated Optimization', 2021."""

from __future__ import annotations

from dataclasses import dataclass

from fedman.algorithms.base import State
from fedman.algorithms.fedavg import FedAvg
from fedman.parts import hyperparameter


@dataclass(frozen=True)
class FedAdam(FedAvg):
    """Adam at the server, which takes a round's mean change for a gradient.

    Step as FedAvg. Server, with Δ = mean_S x_k − θ: m ← β₁m + (1 − β₁)Δ; v ← β₂v + (1 − β₂)Δ²;
    θ ← θ + η_g·m/(√v + τ). v starts at τ²; as a server's vectors start at zero, u = v − τ² is kept in its place.
    """

    title = "FedAdam"
    server = ("w", "m", "u")
    weighted = False

    server_lr: float = hyperparameter(0.01, "η_g, learning rate of the server")
    beta1: float = hyperparameter(0.9, "β₁, memory of a round's change", maximum=1.0)
    beta2: float = hyperparameter(0.99, "β₂, memory of its square", maximum=1.0)
    tau: float = hyperparameter(1e-3, "τ, added to the root of the mean square", minimum=1e-16)

    def update(self, server: State, mean: State, fraction: float) -> State:
        delta, start = mean["w"] - server["w"], self.tau**2
        m = self.beta1 * server["m"] + (1 - self.beta1) * delta
        v = self.beta2 * (server["u"] + start) + (1 - self.beta2) * delta.square()
        return {"w": server["w"] + self.server_lr * m / (v.sqrt() + self.tau), "m": m, "u": v - start}
