"""Work on one device: over a pool of threads on a CPU, as replays of captured graphs on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from fedman.execution.base import Execution
from fedman.execution.cuda_graphs import Graphs, Steps
from fedman.execution.device import one_thread_each

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
        self._copies = threading.local()
        # a thread takes over `one_thread_each` when it asks how many it has; else its first product runs on all cores
        self._pool = ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.get_num_threads)

    @property
    def model(self) -> Execution:
        """The execution; on a CPU this thread's own copy of it."""
        if self.device.type != "cpu":
            return self.execution
        if not hasattr(self._copies, "execution"):
            self._copies.execution = self.execution.copy()
        return self._copies.execution

    def map(self, function: Callable[[Item], Value], items: Iterable[Item]) -> list[Value]:
        """The function of every item, in their order; on a CPU an item a thread, each on one core."""
        with one_thread_each(self.device):
            return list(self._pool.map(function, items) if self.device.type == "cpu" else map(function, items))

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
