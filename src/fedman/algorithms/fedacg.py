"""FedACG. Kim et al., 'Communication-Efficient Federated Learning with Accelerated Client Gradient', 2024."""

from __future__ import annotations

from dataclasses import dataclass

from fedman.algorithms.base import State
from fedman.algorithms.fedprox import FedProx
from fedman.parts import hyperparameter


@dataclass(frozen=True)
class FedACG(FedProx):
    """FedProx from a model that momentum λ_m carries on ahead of the server's own, θ̄; λ_m = 0 is FedProx with a plain
    mean.

    Step: w ← w − η(clip(∇F(w) + μ(w − θ)) + λw), with θ = θ̄ + λ_m·m. Server, with Δ = mean_S x_k − θ:
    m ← λ_m·m + Δ; θ̄ ← θ̄ + m. This makes θ̄ the mean of the uploads, and m its last change.

    The released code's weight b is that of ‖w − θ‖², without ½: μ = 2b.
    """

    title = "FedACG"
    server = ("w", "model")
    cloud = "model"
    weighted = False

    mu: float = hyperparameter(1e-3, "μ, weight of the proximal term")
    server_momentum: float = hyperparameter(0.85, "λ_m, momentum of the server", maximum=1.0)

    def update(self, server: State, mean: State, fraction: float) -> State:
        m = mean["w"] - server["model"]
        return {"w": mean["w"] + self.server_momentum * m, "model": mean["w"]}
