"""A round of one run, or of several stacked into one chunk: launched, then landed.

Between the two a GPU works and the host is free: to write the records of the round before, to draw the batches of the
round to come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import torch

from fedman.errors import Diverged
from fedman.execution.device import one_thread_each
from fedman.execution.transfer import Fetched
from fedman.training import local_steps as local
from fedman.training.engine import Engine, Outcome, Work
from fedman.training.local_steps import Job
from fedman.training.state import Federation

Entry = tuple[Engine, Federation, list[int]]
"""A run in a round: its engine, its state, its cohort."""

STEP = 4  # clients between two sizes of a stack of runs, on a GPU


@dataclass(frozen=True)
class Flight:
    """Local steps under way."""

    runs: Sequence[Entry]
    works: Sequence[list[Work]]

    def land(self) -> Iterator[Outcome | Diverged]:
        """Bring one run's state after the other to the end of the round; one that diverged says so and stays."""
        ends = [engine.end(state, works) for (engine, state, _), works in zip(self.runs, self.works, strict=True)]
        figures = Fetched(torch.cat([end.figures for end in ends])).values()  # a round's one host sync
        rows = iter(figures)
        for (engine, state, cohort), end in zip(self.runs, ends, strict=True):
            try:
                yield engine.settle(state, cohort, end, list(islice(rows, len(cohort))))
            except Diverged as error:
                yield error


def launch(runs: Sequence[Entry]) -> Flight:
    """Start a round. Several runs must share algorithm, model, data and training, but for numbers of the algorithm's
    step, ζ, seed and partition.

    More clients than a chunk may hold are launched one half after the other.
    """
    first, state, cohort = runs[0]
    if len(runs) == 1:
        return Flight(runs, [first.launch(state, cohort)])
    clients = sum(len(cohort) for _, _, cohort in runs)
    if clients > first.chunk:
        half = len(runs) // 2
        return Flight(runs, [*launch(runs[:half]).works, *launch(runs[half:]).works])
    with one_thread_each(first.device), suppress(torch.OutOfMemoryError):
        return Flight(runs, _stacked(runs))
    first.make_room(clients)
    return launch(runs)


def rehearse(runs: Sequence[Entry]) -> None:
    """Where rounds are replayed: capture this one's graph without playing it (see `Graphs.capture`)."""
    first = runs[0][0]
    if first.graphs is None or sum(len(cohort) for _, _, cohort in runs) > first.chunk:
        return
    with suppress(torch.OutOfMemoryError):  # told when the round is played
        local.rehearse(_joined(runs)[0], first.stacked, first.graphs)


def _joined(runs: Sequence[Entry]) -> tuple[Job, list[Job], int]:
    """All cohorts as one chunk, one by one, and how many clients were added.

    On a GPU a chunk of another size is another graph to capture and to hold. So where the runs' cohorts differ in size,
    a client is worked on once more, in vain, up to the next multiple of `STEP`.
    """
    jobs = [engine.job(state, cohort) for engine, state, cohort in runs]
    sizes = [len(job) for job in jobs]
    spare = -sum(sizes) % STEP if runs[0][0].graphs is not None and len(set(sizes)) > 1 else 0
    return local.stack([*jobs, jobs[0].first(spare)] if spare else jobs), jobs, spare


def _stacked(runs: Sequence[Entry]) -> list[list[Work]]:
    first = runs[0][0]
    whole, jobs, spare = _joined(runs)
    w, figures = local.train(whole, first.stacked, first.graphs, first.stopping)
    sizes = [*(len(job) for job in jobs), spare]
    apart = {name: v.split(sizes) for name, v in figures.items()}
    return [
        [Work(job, rows, {name: v[i] for name, v in apart.items()})]
        for i, (job, rows) in enumerate(zip(jobs, w.split(sizes), strict=False))
    ]
