"""FedGloSS. Caldarola et al., 'Beyond Local Sharpness: Communication-Efficient Global Sharpness-aware Minimization for
Federated Learning', 2025."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Grad, Local, State
from fedman.algorithms.feddyn import FedDyn
from fedman.algorithms.steps import climb, descend, norm
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedGloSS(FedDyn):
    """SAM at the clients, and at the server too: θ = θ̄ + ε is sent, uphill from the server's own model θ̄.

    Per batch: e = ρ_l·s/‖s‖ with s = ∇F(w); then w ← w − η(clip(∇F(w + e) + α_k(h_k + w − θ)) + λw).
    After: h_k ← h_k + (w − θ). Server, with Δ = mean_S x_k − θ and h = (1/N) Σ_all h_k, a running sum:
    θ̄ ← θ̄ + Δ + h; ε ← −ρ·Δ/‖Δ‖, zero before the first round.

    In the paper's letters α = 1/β, s_k = −h_k/β and σ = −h/β. With ρ = ρ_l = 0 it differs from FedDyn in one point: all
    of the quadratic term is inside the clip.

    The released code divides what a round adds to h by the number of its clients once more: `state_scale` = 1/|S|.
    """

    title = "FedGloSS"
    server = ("w", "h", "model")
    cloud = "model"
    gradients_per_step = 2

    rho: float = hyperparameter(0.01, "ρ, length of the server's ascent")
    rho_local: float = hyperparameter(0.05, "ρ_l, length of a client's ascent")
    state_scale: float = hyperparameter(1.0, "factor on what a round adds to the server's state; released code: 1/|S|")

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        g = grad(climb(w, grad(w), self.rho_local, hp))
        return descend(w, g + self.alpha / hp.p * w + client["pull"], hp)

    def update(self, server: State, mean: State, fraction: float) -> State:
        delta = mean["w"] - server["w"]
        h = server["h"] + self.state_scale * fraction * mean["h"]
        model = server["model"] + delta + h
        return {"w": model - delta * (self.rho / (norm(delta) + 1e-16)), "h": h, "model": model}

    def extra_decay(self, p: float) -> float:
        return 0.0
