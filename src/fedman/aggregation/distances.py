"""Rules that look at the distances of the clients' models: from each other, or from the model that was sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.aggregation.base import Aggregation, State, blocks
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MultiKrum(Aggregation):
    """The mean of the S − f clients with the best scores. Blanchard et al., 'Machine Learning with Adversaries:
    Byzantine Tolerant Gradient Descent', 2017.

    A client's score is the sum of the squared distances of its model to the S − f − 2 models nearest to it (at least
    one); the lower the better, of equal ones the client with the lower number. f = ⌈assumed_attackers·S⌉. The guarantee
    of the paper needs S ≥ 2f + 3. Shares do not enter the scores; the mean is taken with them.

    The same clients are chosen for all vectors. The others count as the mean of those chosen.
    """

    title = "multi-Krum"

    assumed_attackers: float = hyperparameter(0.2, "share of a cohort that may be hostile", maximum=0.5)

    def chosen(self, clients: int) -> int:
        """How many of so many clients are averaged."""
        return max(1, clients - self.hostile(clients))

    def hostile(self, clients: int) -> int:
        """f, the hostile ones to expect among so many clients."""
        return math.ceil(self.assumed_attackers * clients - 1e-9)

    def aggregate(self, upload: State, share: Tensor, server: State) -> State:
        clients = len(share)
        near = max(1, clients - self.hostile(clients) - 2)
        scores = squared_distances(upload["w"]).sort(-1).values[:, 1 : near + 1].sum(-1)  # the first is its own, zero
        best = scores.argsort(stable=True)[: self.chosen(clients)].sort().values
        chosen = share.new_zeros(clients).index_fill(0, best, 1)[:, None] > 0
        weight = share[best, None] / share[best].sum()
        return {name: v.where(chosen, (v[best] * weight).sum(0).to(v.dtype)) for name, v in upload.items()}


@dataclass(frozen=True)
class Krum(MultiKrum):
    """The one client with the best score of `MultiKrum`."""

    title = "Krum"

    def chosen(self, clients: int) -> int:
        return 1


@dataclass(frozen=True)
class NormClip(Aggregation):
    """w ← θ + s(w − θ) with s = min(1, c·m / ‖w − θ‖), where m is the cohort's median of ‖w − θ‖ (of an even number
    the lower middle one) and c = `clip_multiple`. Sun et al., 'Can You Really Backdoor Federated Learning?', 2019,
    with a fixed bound in place of c·m.

    All that the client uploads besides, changes of the server's vectors, is multiplied by s too. No client moves the
    mean further than c·m times its share, but every one moves it in its direction.
    """

    title = "norm clipping"

    clip_multiple: float = hyperparameter(1.0, "largest distance of an upload, in medians of the cohort")

    def aggregate(self, upload: State, share: Tensor, server: State) -> State:
        w, theta = upload["w"].double(), server["w"]
        moved = (w - theta).norm(dim=-1)
        bound = self.clip_multiple * moved.sort().values[(len(share) - 1) // 2]
        scale = (bound / moved).where(moved > bound, 1)[:, None]

        def scaled(v: Tensor) -> Tensor:
            return (scale * v).where(scale > 0, 0)  # a distance may be infinite

        return {
            **{name: scaled(v) for name, v in upload.items()},
            "w": (theta + scaled(w - theta)).where(scale < 1, w),
        }


def squared_distances(rows: Tensor) -> Tensor:
    """‖row − row'‖² of all pairs, `[S, S]` in float64. Differences, not inner products: those cancel."""
    total = rows.new_zeros(len(rows), len(rows)).double()
    for block in blocks(rows):
        for i, row in enumerate(block):
            total[i] += (block - row).square().sum(-1)
    return total
