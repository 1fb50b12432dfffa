"""A round as a value: its number, who takes part, the learning rate. A pure function of the schedule and the number."""

from __future__ import annotations

from dataclasses import dataclass

from fedman.training.randomness import cohort
from fedman.training.settings import Training


@dataclass(frozen=True)
class Round:
    """One round of one run."""

    number: int  # t, counted from 0
    cohort: list[int]  # S_t, ascending
    lr: float  # η_t


@dataclass(frozen=True)
class Schedule:
    """Who takes part when; see `randomness.cohort`."""

    clients: int
    participation: float
    kind: str
    seed: int

    def round(self, t: int, training: Training) -> Round:
        """Round t, counted from 0."""
        return Round(t, cohort(t, self.clients, self.participation, self.kind, self.seed), training.rate(t))
