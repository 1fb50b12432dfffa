"""The contract of a backend: it carries out the local work of a round, for one run or for several at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fedman.training.aggregate import Trained
from fedman.training.federation import Assignment


class Backend(Protocol):
    """Where clients work."""

    @property
    def queues(self) -> bool:
        """Whether `train` returns before the work is done, so that the host can write the round before meanwhile."""

    def prepare(self, rounds: Iterable[Sequence[Assignment]]) -> None:
        """Before the first round: get ready for those to come."""

    def train(self, now: Sequence[Assignment], upcoming: Sequence[Assignment]) -> list[Trained]:
        """What the clients of these rounds bring back, by run.

        `upcoming` are the rounds after these, for what can be done ahead of them. On `Stopped` nothing has changed.
        """
