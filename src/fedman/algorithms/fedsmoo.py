"""FedSMOO. Sun et al., 'Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching Global
Consistency and Smooth Landscape', 2023."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Grad, Local, Scratch, State
from fedman.algorithms.feddyn import FedDyn
from fedman.algorithms.steps import climb, descend, norm
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedSMOO(FedDyn):
    """FedDyn with an ascent that the clients agree on: s̄ is the server's, and μ_k how far client k's lies from it.

    Per batch: e = ρ·s/‖s‖ with s = ∇F(w) − μ_k − s̄; μ_k ← μ_k + e − s̄; then
    w ← w − η(clip(∇F(w + e) + α_k(h_k − θ)) + (λ + α_k)w).
    Server: s̄ ← ρ·m/‖m‖ with m = mean_S (μ_k − e), e that of the last step. The rest as FedDyn.

    `mu_alone` leaves e out, m = mean_S μ_k, as the code of the paper's author does.
    """

    title = "FedSMOO"
    server = ("w", "h", "s")
    client = ("h", "mu")
    gradients_per_step = 2

    alpha: float = hyperparameter(0.1, "α, weight of the quadratic term")
    rho: float = hyperparameter(0.1, "ρ, length of the ascent")
    mu_alone: bool = hyperparameter(False, "the server's ascent from μ_k alone, as in the released code")

    @property
    def scratch(self) -> tuple[str, ...]:
        return "mu", "m"

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor | Scratch:
        uphill = climb(w, grad(w) - client["mu"] - server["s"], self.rho, hp, eps=1e-7)
        m = client["mu"] - server["s"]
        mu = m + (uphill - w)
        w = descend(w, grad(uphill) + client["pull"], hp, extra_decay=self.alpha / hp.p)
        return w, {"mu": mu, "m": mu if self.mu_alone else m}

    def finish(self, w: Tensor, server: State, client: State, hp: Local) -> tuple[State, State]:
        memory, upload = super().finish(w, server, client, hp)
        return {**memory, "mu": client["mu"]}, {**upload, "m": client["m"]}

    def update(self, server: State, mean: State, fraction: float) -> State:
        s = mean["m"] * (self.rho / (norm(mean["m"]) + 1e-7))
        return {**super().update(server, mean, fraction), "s": s}

    def upload_norm(self, reach: float, steps: int) -> float:
        return 2 * self.rho * steps
