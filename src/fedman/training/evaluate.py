"""Figures of a model on a test set, and on each client's own part of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fedman.execution.cuda_graphs import Inputs, Steps, Tensors
from fedman.execution.executor import Executor
from fedman.tasks import Task
from fedman.training.batches import Samples


class Evaluator:
    """A test set and what evaluates models on it. `parts` are the clients' own samples in it, where they have any."""

    def __init__(
        self,
        executor: Executor,
        samples: Samples,
        dtype: torch.dtype,
        batch: int | None = None,
        parts: Sequence[Iterable[int]] | None = None,
    ) -> None:
        self.executor, self.samples, self.dtype, self.parts = executor, samples, dtype, parts
        self.batch = batch or (100 if executor.device.type == "cpu" else 10_000)

    @property
    def task(self) -> Task:
        return self.executor.execution.task

    def scores(self, w: Tensor, each: bool = False) -> Tensor:
        """`[n, 2 + K]` on the device for one model `[P]`, as `Execution.scores` gives them: the sum over the test set
        (n = 1), or `each` sample's."""
        if self.executor.graphs is None:
            return self._scores(w, each)

        def scores(inputs: Inputs, j: Tensor, carry: Tensors) -> Tensors:
            return {"scores": self._scores(inputs["test"]["w"], each)}

        _, found = self.executor.graphs.run(Steps(lambda *_: {}, {"test": {"w": w}}, {}, 0, each, scores))
        return found["scores"]

    def rehearse(self, w: Tensor) -> None:
        """All that `scores` launches on a GPU, for `Execution.rehearse`."""
        self._scores(w, each=False)

    def personal_scores(self, model: Callable[[int], Tensor]) -> Tensor:
        """As `scores` of each sample, by the model of the client that holds it; zero where nobody does."""
        held = {k: list(part) for k, part in enumerate(self.parts or ()) if len(list(part))}

        def of(k: int) -> Tensor:
            x, y = self.samples.inputs(self.samples.x_test[held[k]], self.dtype), self.samples.y_test[held[k]]
            return self._batch_scores(model(k), x, y)

        found = self.executor.map(of, held)
        rows = found[0].new_zeros(len(self.samples.y_test), found[0].shape[1])
        for part, scores in zip(held.values(), found, strict=True):
            rows[part] = scores
        return rows

    def grade(self, scores: Sequence[Sequence[float]]) -> tuple[dict[str, float], float]:
        """The task's figures and the mean loss from rows of `scores`, on the host."""
        weight, *sums = map(_sum, zip(*scores, strict=True))
        names = ("loss", *self.executor.execution.scored)
        means = {name: s / weight if weight else math.nan for name, s in zip(names, sums, strict=True)}
        return grade(self.task, means), means["loss"]

    def by_client(self, scores: Sequence[Sequence[float]]) -> list[float]:
        """The headline of every client with test samples of its own that count, from `each` sample's scores."""
        rows = ([scores[i] for i in part] for part in self.parts or ())
        return [self.grade(own)[0][self.task.headline] for own in rows if any(weight for weight, *_ in own)]

    def _scores(self, w: Tensor, each: bool) -> Tensor:
        def part(lo: int) -> Tensor:
            scores = self._batch_scores(w, *self._test(lo, lo + self.batch))
            return scores if each else scores.sum(0, keepdim=True)

        parts = torch.cat(self.executor.map(part, range(0, len(self.samples.y_test), self.batch)))
        return parts if each else parts.sum(0, keepdim=True)

    def _batch_scores(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        scores = self.executor.model.scores(w, x, y)
        self.executor.execution.scored = self.executor.model.scored
        return scores

    def _test(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """A slice of the test set as the execution wants it."""
        if self.executor.execution.image_layout is None:
            return self.samples.test(lo, hi, self.dtype)
        return self._prepared[lo:hi], self.samples.y_test[lo:hi]

    @cached_property
    def _prepared(self) -> Tensor:
        """The whole test set in the form that the execution takes, made once."""
        x, _ = self.samples.test(0, len(self.samples.y_test), self.dtype)
        return self.executor.execution.prepare_test(x)


def grade(task: Task, means: Mapping[str, float]) -> dict[str, float]:
    """A task's figures as plain numbers, in which `summarise` may compute with numpy or torch."""
    return {name: float(value) for name, value in task.summarise(means).items()}


def spread(values: Sequence[float], higher_is_better: bool) -> dict[str, float]:
    """Figures of a score over clients: its mean, the mean of the worst tenth (at least one), its standard deviation.
    What is not a number is worst of all."""
    worst = sorted(values, key=lambda v: (not math.isnan(v), v if higher_is_better else -v))[
        : max(1, len(values) // 10)
    ]
    return {
        "mean": _sum(values) / len(values),
        "worst_tenth": _sum(worst) / len(worst),
        "spread": statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan,
    }


def _sum(values: Sequence[float]) -> float:
    """The sum, rounded once; inf where it is too large, nan where inf and −inf meet."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)
