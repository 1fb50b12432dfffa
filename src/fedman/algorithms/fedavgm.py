"""FedAvgM. Hsu et al., 'Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification',
2019."""

from __future__ import annotations

from dataclasses import dataclass

from fedman.algorithms.base import State
from fedman.algorithms.fedavg import FedAvg
from fedman.parts import hyperparameter


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg with momentum at the server; β = 0, η_g = 1 is FedAvg with a plain mean.

    Step as FedAvg. Server, with Δ = mean_S x_k − θ: m ← βm + Δ; θ ← θ + η_g·m.
    """

    title = "FedAvgM"
    server = ("w", "m")
    weighted = False

    server_momentum: float = hyperparameter(0.9, "β, momentum of the server", maximum=1.0)
    server_lr: float = hyperparameter(1.0, "η_g, learning rate of the server")

    def update(self, server: State, mean: State, fraction: float) -> State:
        m = self.server_momentum * server["m"] + mean["w"] - server["w"]
        return {"w": server["w"] + self.server_lr * m, "m": m}
