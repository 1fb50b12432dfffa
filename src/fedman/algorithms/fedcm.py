"""FedCM. Xu et al., 'FedCM: Federated Learning with Client-level Momentum', 2021."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.algorithms.base import Algorithm, Grad, Local, State
from fedman.algorithms.steps import descend
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FedCM(Algorithm):
    """Every local step follows the last round's direction d too; α = 1 is FedAvg with a plain mean.

    Step: w ← w − η(clip(α∇F(w) + (1 − α)d) + λw). Server: θ ← mean_S x_k; d ← mean_S (θ − x_k)/(K_k·η), zero before
    the first round.

    Where clients take equally many steps d is (θ − mean_S x_k)/(K·η), with K and η of the round it comes from; where
    they do not, it is the mean of the clients' own directions.
    """

    title = "FedCM"
    server = ("w", "d")
    presumes_sgd = True

    alpha: float = hyperparameter(0.1, "α, share of the client's own gradient", maximum=1.0)

    def begin(self, server: State, client: State, hp: Local) -> State:
        return {"push": ((1 - self.alpha) * server["d"]).expand(len(hp.p), -1)}

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor:
        return descend(w, self.alpha * grad(w) + client["push"], hp)

    def finish(self, w: Tensor, server: State, client: State, hp: Local) -> tuple[State, State]:
        return {}, {"w": w, "d": (server["w"] - w) / (hp.steps * hp.lr)}

    def update(self, server: State, mean: State, fraction: float) -> State:
        return {"w": mean["w"], "d": mean["d"]}
