"""Work on one device: over a pool of threads on a CPU, as replays of captured graphs on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from fedman.execution.base import Execution
from fedman.execution.cuda_graphs import Graphs, Steps
from fedman.execution.device import one_thread_each, usual_threads

Item = TypeVar("Item")
Value = TypeVar("Value")


class Stopped(Exception):
    """The user asked to stop; the state is that of the last finished round."""


class Executor:
    """Carries out what an execution is asked for, until `stopping` is set."""

    def __init__(
        self, execution: Execution, device: torch.device, stopping: threading.Event, graphs: Graphs | None = None
    ) -> None:
        self.execution, self.device, self.stopping = execution, device, stopping
        self.graphs = Graphs() if graphs is None and device.type == "cuda" else graphs
        self._own = threading.local()  # what each thread has
        self._pool = ThreadPoolExecutor(usual_threads())

    @property
    def model(self) -> Execution:
        """The execution; on a CPU this thread's own copy of it."""
        if self.device.type != "cpu":
            return self.execution
        if not hasattr(self._own, "execution"):
            self._own.execution = self.execution.copy()
        return self._own.execution

    def map(self, function: Callable[[Item], Value], items: Iterable[Item]) -> list[Value]:
        """The function of every item, in their order; on a CPU an item a thread, each on one core."""
        with one_thread_each(self.device):
            if self.device.type != "cpu":
                return list(map(function, items))
            return list(self._pool.map(partial(self._on_one_core, function), items))

    def _on_one_core(self, function: Callable[[Item], Value], item: Item) -> Value:
        """In a thread of the pool. Before its first item it has as many threads as were set last, by whomever; when it
        is told at its start, the work of all items may be over already and the number is that of others."""
        if not hasattr(self._own, "on_one_core"):
            torch.set_num_threads(1)
            self._own.on_one_core = True
        return function(item)

    def run(self, steps: Steps) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What is carried on after all steps, and the figures."""
        if self.graphs is not None and not self.stopping.is_set():
            return self.graphs.run(steps)
        carry = dict(steps.carry)
        for j in range(steps.count):
            if self.stopping.is_set():
                raise Stopped
            carry = dict(steps.step(steps.inputs, j, carry))
        return carry, dict(steps.figures(steps.inputs, 0, carry))
