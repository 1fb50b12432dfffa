"""Rules that look at every coordinate alone. Yin et al., 'Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates', 2018.

There clients count alike. Here a client counts with its share: a coordinate's values are sorted, and each takes up its
share of the whole weight W. With equal shares this is the definition of the paper.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.aggregation.base import Aggregation, State, blocks
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-12  # of the whole weight: sums of shares that differ by less are equal


@dataclass(frozen=True)
class Coordinatewise(Aggregation):
    """A rule for the sorted values of a coordinate, the same for all vectors."""

    @abstractmethod
    def combine(self, values: Tensor, share: Tensor) -> Tensor:
        """`[B]` from values `[S, B]`, sorted in every column, and the shares `[S, B]` of whose they are."""

    def aggregate(self, upload: State, share: Tensor, server: State) -> State:
        from torch import cat

        order = share.argsort(stable=True)  # of equal values the lighter comes first, whoever it is from
        share = share[order]

        def combined(block: Tensor) -> Tensor:
            values, whose = block[order].sort(dim=0, stable=True)
            return self.combine(values, share[whose])

        return {name: cat([combined(block) for block in blocks(v)]) for name, v in upload.items()}


@dataclass(frozen=True)
class Median(Coordinatewise):
    """The weighted median: half of the weight lies on either side; where that holds between two values, their middle.

    Bounded by the honest values as long as the hostile clients have less than half of a cohort's weight.
    """

    title = "coordinate median"

    def combine(self, values: Tensor, share: Tensor) -> Tensor:
        return median(values, share)


@dataclass(frozen=True)
class TrimmedMean(Coordinatewise):
    """The weighted mean without the clients that lie, even in part, in the outer `trim` of the weight at either end.

    With equal shares ⌈trim·S⌉ of S clients are left out at each end. Where nothing is left, the median is taken.
    Bounded by the honest values as long as the hostile clients have at most `trim` of a cohort's weight, and less than
    half.
    """

    title = "trimmed mean"

    trim: float = hyperparameter(0.2, "share of the clients left out at each end", maximum=0.5)

    def combine(self, values: Tensor, share: Tensor) -> Tensor:
        until = share.cumsum(0)
        slack, outer = ROUNDING * until[-1], self.trim * until[-1]
        kept = (until - share >= outer - slack) & (until <= until[-1] - outer + slack)
        weight = share.where(kept, 0)
        mean = (values.where(kept, 0) * weight).sum(0) / weight.sum(0)
        return mean.where(kept.any(0), median(values, share))


def median(values: Tensor, share: Tensor) -> Tensor:
    """The weighted median of every column of sorted values: the middle of the lower and the upper one."""
    twice = 2 * share.cumsum(0)
    whole = twice[-1] / 2
    lower = (twice < whole * (1 - ROUNDING)).sum(0, keepdim=True)
    upper = (twice <= whole * (1 + ROUNDING)).sum(0, keepdim=True)
    return (values.gather(0, lower) / 2 + values.gather(0, upper) / 2)[0]
