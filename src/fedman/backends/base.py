"""The contract of a backend: it carries out the local work of a round, for one run or for several at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fedman.training.aggregate import Trained
from fedman.training.federation import Assignment


class Backend(Protocol):
    """Where clients work."""

    def prepare(self, rounds: Iterable[Sequence[Assignment]]) -> None:
        """Before the first round: get ready for those to come."""

    def train(self, now: Sequence[Assignment], upcoming: Sequence[Assignment]) -> list[Trained]:
        """What the clients of these rounds bring back, by run; on a GPU queued, while the host is free.

        `upcoming` are the rounds after these, for what can be done ahead of them. On `Stopped` nothing has changed.
        """
