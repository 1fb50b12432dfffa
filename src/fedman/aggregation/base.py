"""What an aggregation rule is: what counts of the clients' uploads in the mean from which the server takes its step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedman.optimizers import State

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 18  # columns that are worked on at a time, to bound the memory of copies in float64


@dataclass(frozen=True)
class Aggregation(ABC):
    """What counts of the uploads. A subclass is a frozen set of hyper-parameters.

    An algorithm's `update` receives Σ share·u / Σ share over the rows u that a rule returns.
    """

    title: ClassVar[str]

    @abstractmethod
    def aggregate(self, upload: State, share: Tensor, server: State) -> State:
        """What the uploads come to, under the same names: `[P]` each; or `[S, P]`, what each client's counts as.

        `upload`: `[S, P]` each, finite, the clients in the order of their numbers: the models "w", and what else the
        algorithm uploads (changes of "h", "g", "c"). `share`: `[S]` in float64, the clients' weights in the mean, all
        one where the algorithm averages plainly. `server`: the server's vectors `[P]`, θ is "w".

        Pure, and in float64 where it sums. What a client counts as is also its part of `all`, the mean of all clients'
        last models: its own row, or the result for everybody.
        """


@dataclass(frozen=True)
class Mean(Aggregation):
    """Every upload counts as it is: one client can move the mean anywhere."""

    title = "mean"

    def aggregate(self, upload: State, share: Tensor, server: State) -> State:
        return upload


def blocks(rows: Tensor) -> Iterator[Tensor]:
    """The columns of `[S, P]`, some at a time, in float64."""
    for block in rows.split(BLOCK, -1):
        yield block.double()
