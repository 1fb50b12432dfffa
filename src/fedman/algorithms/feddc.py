"""FedDC. Gao et al., 'FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction',
2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Algorithm, Grad, Local, State
from fedman.algorithms.steps import descend
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedDC(Algorithm):
    """Local objective F(w) + (α_k/2)‖w + h_k − θ‖² + ⟨w, g/p_k − g_k⟩, with α_k = α/p_k.

    Step: w ← w − η(clip(∇F(w) + α_k(w + h_k − θ) + g/p_k − g_k) + λw): all of it inside the clip.
    After, with Δ = w − θ: h_k ← h_k + Δ; g_k ← g_k − g/p_k − Δ/(K·η_0).
    Server: g ← g + (1/N) Σ_S p_k·(change of g_k); θ ← mean_S x_k + h with h = (1/N) Σ_all h_k, a running sum.

    η_0 is the undecayed rate, as in the published code; `decayed` takes the round's own η_t instead.
    """

    title = "FedDC"
    server = ("w", "h", "g")
    client = ("h", "g")
    presumes_sgd = True

    alpha: float = hyperparameter(0.01, "α, weight of the quadratic term")
    decayed: bool = hyperparameter(False, "control states with the decayed learning rate")

    def begin(self, server: State, client: State, hp: Local) -> State:
        return {"pull": self.alpha / hp.p * (client["h"] - server["w"]) + server["g"] / hp.p - client["g"]}

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        return descend(w, grad(w) + self.alpha / hp.p * w + client["pull"], hp)

    def finish(self, w: Tensor, server: State, client: State, hp: Local) -> tuple[State, State]:
        delta = w - server["w"]
        lr = hp.lr if self.decayed else hp.lr0
        change = -server["g"] / hp.p - delta / (hp.steps * lr)
        memory = {"h": client["h"] + delta, "g": client["g"] + change}
        return memory, {"w": w, "h": delta, "g": hp.p * change}

    def update(self, server: State, mean: State, fraction: float) -> State:
        h = server["h"] + fraction * mean["h"]
        return {"w": mean["w"] + h, "h": h, "g": server["g"] + fraction * mean["g"]}
