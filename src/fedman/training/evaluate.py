"""Test accuracy and cross-entropy of one model."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from fedman.execution.cuda_graphs import Steps
from fedman.execution.executor import Executor
from fedman.training.batches import Samples


class Evaluator:
    """A test set and what evaluates models on it."""

    def __init__(self, executor: Executor, samples: Samples, dtype: torch.dtype, batch: int | None = None) -> None:
        self.executor, self.samples, self.dtype = executor, samples, dtype
        self.batch = batch or (100 if executor.device.type == "cpu" else 10_000)

    def scores(self, w: Tensor) -> Tensor:
        """`[2]` on the device: correct answers and summed cross-entropy of one model `[P]` on the test set."""
        if self.executor.graphs is None:
            return self._scores(w)
        carry = {"scores": torch.zeros(2, dtype=torch.float64, device=w.device)}
        steps = Steps(
            lambda inputs, j, carry: {"scores": self._scores(inputs["test"]["w"])}, {"test": {"w": w}}, carry, 1
        )
        return self.executor.graphs.run(steps)["scores"]

    def grade(self, scores: list[float]) -> tuple[float, float]:
        """`scores`, on the host, as accuracy in percent and mean cross-entropy."""
        n = len(self.samples.y_test)
        return 100 * scores[0] / n, scores[1] / n

    def _scores(self, w: Tensor) -> Tensor:
        def part(lo: int) -> Tensor:
            return self.executor.model.scores(w, *self._test(lo, lo + self.batch))

        return torch.stack(self.executor.map(part, range(0, len(self.samples.y_test), self.batch))).sum(0)

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
