"""SCAFFOLD. Karimireddy et al., 'SCAFFOLD: Stochastic Controlled Averaging for Federated Learning', 2020."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Algorithm, Grad, Local, State
from fedman.algorithms.steps import descend
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """Control variates c_k of the clients and c of the server correct each step for the client's drift.

    Step: w ← w − η(clip(∇F(w) + c/p_k − c_k) + λw). After: c_k ← c_k − c + (θ − w)/(K·η_0).
    Server: θ ← mean_S x_k; c ← c + (1/N) Σ_S p_k·(change of c_k).

    η_0 is the undecayed rate, as in the published code; `decayed` takes the round's own η_t instead.
    """

    title = "SCAFFOLD"
    server = ("w", "c")
    client = ("c",)
    presumes_sgd = True

    decayed: bool = hyperparameter(False, "control states with the decayed learning rate")

    def begin(self, server: State, client: State, hp: Local) -> State:
        return {"pull": server["c"] / hp.p - client["c"]}

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        return descend(w, grad(w) + client["pull"], hp)

    def finish(self, w: Tensor, server: State, client: State, hp: Local) -> tuple[State, State]:
        lr = hp.lr if self.decayed else hp.lr0
        change = (server["w"] - w) / (hp.steps * lr) - server["c"]
        return {"c": client["c"] + change}, {"w": w, "c": hp.p * change}

    def update(self, server: State, mean: State, fraction: float) -> State:
        return {"w": mean["w"], "c": server["c"] + fraction * mean["c"]}
