"""Models evaluated side by side: every row's gradient on a CUDA stream of its own.

In a captured CUDA graph the streams become branches, which the GPU works on at the same time. A model of any kind
then costs about what the same samples cost one large model, since small kernels of several clients share the GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fedman.execution.base import Batch, Execution
from fedman.execution.compiled import compile_graph
from fedman.execution.device import strictly_deterministic
from fedman.execution.one_by_one import OneByOne
from fedman.penalties import Penalty
from fedman.tasks import Task

STREAMS = 16  # rows worked on at the same time: what memory grows with, and more are no faster

COMPILED = "compiled branches"

Gradient = Callable[[Tensor, Batch, Tensor | float], tuple[Tensor, ...]]


class Branches(OneByOne):
    """The plain module for every row, in parallel on a GPU; `compiled` into one function of a row where that can be.

    Compiling takes 10 to 60 s and saves a third to a half of a step. On a CPU the rows follow each other.
    """

    def __init__(
        self, model: nn.Module, task: Task, penalty: Penalty, precision: str = "fp32", compiled: bool = False
    ) -> None:
        super().__init__(model, task, penalty, precision)
        self.compiled = compiled
        self.title = COMPILED if compiled else "branches"
        self._streams: list[torch.cuda.Stream] = []
        self._known: dict[object, tuple[Gradient, list[Tensor]]] = {}

    def copy(self) -> Execution:
        return type(self)(self.model, self.task, self.penalty, self.precision, self.compiled)

    def gradient(self, W: Tensor, batch: Batch, zeta: Tensor | float) -> Any:
        with strictly_deterministic(self.strict):
            row, like = self._row(W, batch, zeta)
            whole = tuple(v.new_empty(len(W), *v.shape[1:]) for v in like)
            with self._branches(W.device, len(W)) as branches:
                for i, branch in enumerate(branches):
                    with branch:
                        for values, v in zip(whole, row(*_at(i, W, batch, zeta)), strict=True):
                            values[i : i + 1].copy_(v)
        return whole

    def _row(self, W: Tensor, batch: Batch, zeta: Tensor | float) -> tuple[Gradient, list[Tensor]]:
        """The gradient of one row as a function of W, batch and ζ with one row, and what its results look like.

        A row is evaluated for that, and then compiled.
        """
        kinds = tuple(None if v is None else (v.shape[1:], v.dtype) for v in batch)
        key = kinds, W.dtype, None if isinstance(zeta, Tensor) else zeta
        if key not in self._known:
            last = _at(len(W) - 1, W, batch, zeta)  # in memory it is aligned the worst
            row: Gradient = super().gradient
            like = [v[:0] for v in row(*last)]  # before tracing: it also brings the module's constants to the device
            if self.compiled:
                row = self._compile(row, last)
            self._known[key] = row, like
        return self._known[key]

    def _compile(self, row: Gradient, example: tuple[Tensor, Batch, Tensor | float]) -> Gradient:
        """The function compiled, if it can be: any module of a user's can be in it."""
        W, batch, zeta = example
        given = [W, *batch, zeta]
        places = [i for i, v in enumerate(given) if isinstance(v, Tensor)]

        def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            filled = list(given)
            for place, v in zip(places, tensors, strict=True):
                filled[place] = v
            return row(filled[0], Batch._make(filled[1:-1]), filled[-1])

        try:
            function = compile_graph(of_tensors, [given[i] for i in places])
            function(*(given[i] for i in places))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler's own, or a user's module's
            self.compiled, self.title = False, "branches"
            reason = " ".join(str(error).split())[:160]
            warnings.warn(f"branches are not compiled, which is slower: {type(error).__name__}: {reason}", stacklevel=2)
            return row

        def compiled(W: Tensor, batch: Batch, zeta: Tensor | float) -> tuple[Tensor, ...]:
            now = [W, *batch, zeta]
            return function(*(now[i] for i in places))

        return compiled

    @contextmanager
    def _branches(self, device: torch.device, rows: int) -> Iterator[Any]:
        """A context for every row, in which its work is queued; at the end all of them have been waited for."""
        if device.type != "cuda":
            yield [nullcontext()] * rows
            return
        while len(self._streams) < min(rows, STREAMS):
            self._streams.append(torch.cuda.Stream())
        streams, main = self._streams[:rows], torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(main)
        try:
            yield [torch.cuda.stream(streams[i % len(streams)]) for i in range(rows)]
        finally:  # also after a lack of memory: a capture ends with all its branches joined
            for stream in streams:
                main.wait_stream(stream)


def _at(i: int, W: Tensor, batch: Batch, zeta: Tensor | float) -> tuple[Tensor, Batch, Tensor | float]:
    """Row i of everything, as the only one."""
    rows = Batch._make(None if v is None else v[i : i + 1] for v in batch)
    return W[i : i + 1], rows, zeta[i : i + 1] if isinstance(zeta, Tensor) else zeta
