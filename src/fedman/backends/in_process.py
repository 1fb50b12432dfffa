"""Clients trained in this process, many at a time: of one run, or of several stacked into one chunk.

Clients that are worked on together are a chunk: matrices `[S, P]` with a row for every client. Nothing in a local step
connects two rows, so a chunk can hold the cohorts of several runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedman.algorithms import State
from fedman.errors import UserError
from fedman.execution.base import is_large
from fedman.execution.executor import Executor
from fedman.training.aggregate import Trained
from fedman.training.attacks import poisoned
from fedman.training.federation import Assignment, Draw
from fedman.training.local_steps import LocalResult, LocalWork, run_local_steps, stack, steps_of

STEP = 4  # clients between two sizes of a stack of runs, on a GPU


@dataclass(frozen=True)
class Piece:
    """Clients of one run in a chunk."""

    of: Assignment
    clients: list[int]


@dataclass(frozen=True)
class Done:
    """The local work of a piece, done or queued on the device."""

    work: LocalWork
    result: LocalResult


class InProcess:
    """Trains chunks of at most `chunk` clients; where they do not fit into memory, of half as many from then on."""

    def __init__(self, executor: Executor, chunk: int) -> None:
        self.executor, self.chunk = executor, chunk
        self._ahead: dict[tuple[object, ...], Draw] = {}

    @property
    def queues(self) -> bool:
        """On a GPU."""
        return self.executor.device.type == "cuda"

    def rehearse(self, rounds: Iterable[Sequence[Assignment]]) -> None:
        """All that rounds of these sizes launch on a GPU, for `Execution.rehearse`."""
        for each in {_size(each): each for each in rounds if 0 < _size(each) <= self.chunk}.values():
            work, _, _ = self._stack([Piece(a, a.round.cohort) for a in each])
            steps = steps_of(work, self.executor.model)
            first = torch.zeros(1, dtype=torch.int64, device=self.executor.device)
            steps.figures(steps.inputs, first, steps.step(steps.inputs, first, steps.carry))

    def prepare(self, rounds: Iterable[Sequence[Assignment]]) -> None:
        """On a GPU, capture the largest round's graph without playing it: the others then live in its memory."""
        graphs = self.executor.graphs
        largest = max(rounds, key=_size, default=()) if graphs is not None else ()
        if graphs is None or not 0 < _size(largest) <= self.chunk:
            return
        with suppress(torch.OutOfMemoryError):  # raised again when the round is played
            work, _, _ = self._stack([Piece(a, a.round.cohort) for a in largest])
            graphs.capture(steps_of(work, self.executor.model))

    def train(self, now: Sequence[Assignment], upcoming: Sequence[Assignment]) -> list[Trained]:
        done = self._train(now)
        if self.executor.device.type == "cuda":  # draw while it is busy
            pieces = [piece for chunk in self._chunks(upcoming) for piece in chunk]
            self._ahead = {_key(piece): self._draw(piece) for piece in pieces}
        while True:  # what was computed stays; the graphs free their memory
            with suppress(torch.OutOfMemoryError):
                return [self._collect(assignment, parts) for assignment, parts in zip(now, done, strict=True)]
            self._make_room(max(len(part.work) for parts in done for part in parts))

    def _train(self, now: Sequence[Assignment]) -> list[list[Done]]:
        """The local work of every run, in pieces; half as many clients at a time after a lack of memory."""
        while True:
            chunks = list(self._chunks(now))
            with suppress(torch.OutOfMemoryError):
                longest_first = sorted(range(len(chunks)), key=lambda i: -_samples(chunks[i]))  # cores end together
                worked = self.executor.map(self._work, [chunks[i] for i in longest_first])
                by_chunk = dict(zip(longest_first, worked, strict=True))
                done = [part for i in range(len(chunks)) for part in by_chunk[i]]
                pieces = [piece for chunk in chunks for piece in chunk]
                return [[d for p, d in zip(pieces, done, strict=True) if p.of is each] for each in now]
            self._make_room(max(sum(len(piece.clients) for piece in chunk) for chunk in chunks))

    def _chunks(self, now: Sequence[Assignment]) -> Iterator[list[Piece]]:
        """Whole cohorts of several runs together, as long as they fit; otherwise the cohort of one run in parts."""
        if len(now) > 1 and _size(now) > self.chunk:
            half = len(now) // 2
            yield from self._chunks(now[:half])
            yield from self._chunks(now[half:])
        elif len(now) > 1:
            yield [Piece(each, each.round.cohort) for each in now]
        elif now:
            cohort = now[0].round.cohort
            yield from ([Piece(now[0], cohort[i : i + self.chunk])] for i in range(0, len(cohort), self.chunk))

    def _work(self, chunk: list[Piece]) -> list[Done]:
        whole, works, dummies = self._stack(chunk)
        results = run_local_steps(whole, self.executor).split([*map(len, works), dummies])
        return [Done(work, result) for work, result in zip(works, results, strict=False)]

    def _stack(self, chunk: list[Piece]) -> tuple[LocalWork, list[LocalWork], int]:
        """A chunk as one work, its pieces, and the number of dummy clients it is padded with.

        Captured graphs have one size each. So where the runs' cohorts differ in size, a stack of them is padded up to
        the next multiple of `STEP`.
        """
        works = [self._piece(piece) for piece in chunk]
        sizes = [len(work) for work in works]
        dummies = -sum(sizes) % STEP if self.executor.graphs is not None and len(set(sizes)) > 1 else 0
        return stack([*works, works[0].dummies(dummies)] if dummies else works), works, dummies

    def _piece(self, piece: Piece) -> LocalWork:
        draw = self._ahead.pop(_key(piece), None) or self._draw(piece)
        state = piece.of.state
        return piece.of.federation.work(draw, state.server, state.clients.memories(piece.clients))

    def _draw(self, piece: Piece) -> Draw:
        return piece.of.federation.draw(piece.of.round, piece.clients)

    def _collect(self, assignment: Assignment, parts: list[Done]) -> Trained:
        """The results of the cohort's local work; nothing waits for the device."""
        federation, state, cohort = assignment.federation, assignment.state, assignment.round.cohort
        ends = [federation.finish(done.work, done.result) for done in parts]
        memory, upload = (_join([end[i] for end in ends]) for i in (0, 1))
        attackers = [k for k in cohort if k in federation.attackers]
        if attackers:
            w = poisoned(federation.attack, attackers, cohort, upload["w"], state.server["w"])
            upload = self._forged(assignment, parts, w)
        return Trained(
            clients=cohort,
            memory=memory,
            upload=upload,
            previous=state.clients.uploads(cohort),
            figures=_join([done.result.figures for done in parts]),
            attackers=attackers if federation.attackers else None,
        )

    def _forged(self, assignment: Assignment, parts: list[Done], w: Tensor) -> dict[str, Tensor]:
        """The uploads of the cohort if its models were w: all that is uploaded besides follows from them."""
        models = w.split([len(done.work) for done in parts])
        results = [replace(done.result, w=rows) for done, rows in zip(parts, models, strict=True)]
        finish = assignment.federation.finish
        return _join([finish(done.work, result)[1] for done, result in zip(parts, results, strict=True)])

    def _make_room(self, clients: int) -> None:
        """After a lack of memory with `clients` clients at once: half of them from now on."""
        if clients == 1:
            raise UserError("chunk: not even one client at a time fits into memory; use a smaller batch_size")
        self.chunk = clients // 2
        if self.executor.graphs is not None:
            self.executor.graphs.clear()
        warnings.warn(f"{clients} clients at once do not fit into memory; going on with {self.chunk}", stacklevel=2)


def default_chunk(size: int, device: torch.device) -> int:
    """How many clients of a model of `size` parameters to work on together: on a GPU the whole cohort; on a CPU one
    client a core.

    Small models are bound by the cost of a call, not of its arithmetic, and gain from stacking on a CPU too.
    A function of the model alone, so that the bits of a result do not depend on the machine or its load.
    """
    return 1 if device.type == "cpu" and is_large(size) else 1024


def _size(assignments: Sequence[Assignment]) -> int:
    """The clients of all of them."""
    return sum(len(each.round.cohort) for each in assignments)


def _samples(chunk: list[Piece]) -> int:
    """The samples of all clients of a chunk."""
    return sum(sum(piece.of.federation.samples.sizes(piece.clients)) for piece in chunk)


def _key(piece: Piece) -> tuple[object, ...]:
    return piece.of.federation, piece.of.round.number, *piece.clients


def _join(parts: Sequence[State]) -> dict[str, Tensor]:
    return {name: torch.cat([p[name] for p in parts]) if len(parts) > 1 else v for name, v in parts[0].items()}
