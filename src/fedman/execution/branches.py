"""Models evaluated side by side: in a captured CUDA graph every block of rows is a branch, on a stream of its own.

The GPU works on the branches at the same time. A model of any kind then costs about what the same samples cost one
large model, since small kernels of several clients share the GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedman.errors import describe
from fedman.execution.base import Batch, Execution, of_rows
from fedman.execution.compiled import compile_graph
from fedman.execution.device import strictly_deterministic
from fedman.execution.one_by_one import OneByOne
from fedman.execution.vmapped import Vmapped
from fedman.penalties import Penalty
from fedman.tasks import Task

STREAMS = 16  # blocks worked on at the same time: what memory grows with, and more are no faster

Gradient = Callable[[Tensor, Batch, Tensor | float], tuple[Tensor, ...]]


class Branches(OneByOne):
    """The plain module for every row, in parallel on a GPU; `compiled` into one function of a row where that can be.

    Compiling takes 17 to 75 s and saves a third to a half of a step. On a CPU the rows follow each other.
    """

    title = "branches"
    sizes: ClassVar[tuple[int, ...]] = (1,)  # of blocks, in rows: as many of the first as there are, then of the next

    def __init__(
        self, model: nn.Module, task: Task, penalty: Penalty, precision: str = "fp32", compiled: bool = False
    ) -> None:
        super().__init__(model, task, penalty, precision)
        self.compiled = compiled
        self.title = f"compiled {type(self).title}" if compiled else type(self).title
        self._streams: list[torch.cuda.Stream] = []
        self._known: dict[object, tuple[Gradient, list[Tensor]]] = {}

    def copy(self) -> Execution:
        return type(self)(*self.parts, self.compiled)

    def gradient(self, W: Tensor, batch: Batch, zeta: Tensor | float) -> Any:
        blocks = self._blocks(len(W))
        with strictly_deterministic(self.strict):
            functions = [self._function(of_rows(block, W, batch, zeta)) for block in blocks[::-1]][::-1]
            if len(blocks) == 1:
                return functions[0][0](W, batch, zeta)
            whole = tuple(v.new_empty(len(W), *v.shape[1:]) for v in functions[0][1])
            with self._branches(W.device, len(blocks)) as branches:
                for block, branch, (function, _) in zip(blocks, branches, functions, strict=True):
                    with branch:
                        for values, v in zip(whole, function(*of_rows(block, W, batch, zeta)), strict=True):
                            values[block].copy_(v)
        return whole

    def _blocks(self, rows: int) -> list[slice]:
        """`rows` rows, in blocks."""
        blocks, start = [], 0
        for size in self.sizes:
            while rows - start >= size:
                blocks.append(slice(start, start + size))
                start += size
        return blocks

    def _function(self, block: tuple[Tensor, Batch, Tensor | float]) -> tuple[Gradient, list[Tensor]]:
        """The gradient of as many rows as `block` has as a function of W, batch and ζ, and what its results look like.

        The first block of a size is evaluated for that, and its function compiled.
        """
        W, batch, zeta = block
        kinds = tuple(None if v is None else (v.shape, v.dtype) for v in batch)
        key = kinds, len(W), W.dtype, None if isinstance(zeta, Tensor) else zeta
        if key not in self._known:
            function: Gradient = super().gradient
            like = [v[:0] for v in function(*block)]  # brings the module's constants to the device, for the trace
            if self.compiled:
                function = self._compile(function, block)
            self._known[key] = function, like
        return self._known[key]

    def _compile(self, function: Gradient, example: tuple[Tensor, Batch, Tensor | float]) -> Gradient:
        """The function compiled, if it can be: any module of a user's can be in it."""
        W, batch, zeta = example
        given = [W, *batch, zeta]
        places = [i for i, v in enumerate(given) if isinstance(v, Tensor)]

        def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            filled = list(given)
            for place, v in zip(places, tensors, strict=True):
                filled[place] = v
            return function(filled[0], Batch._make(filled[1:-1]), filled[-1])

        try:
            graph = compile_graph(of_tensors, [given[i] for i in places])
            graph(*(given[i] for i in places))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler's own, or a user's module's
            self.compiled, self.title = False, type(self).title
            warnings.warn(f"{self.title}: not compiled, which is slower: {describe(error)}", stacklevel=2)
            return function

        def compiled(W: Tensor, batch: Batch, zeta: Tensor | float) -> tuple[Tensor, ...]:
            now = [W, *batch, zeta]
            return graph(*(now[i] for i in places))

        return compiled

    @contextmanager
    def _branches(self, device: torch.device, count: int) -> Iterator[Any]:
        """A context for every block, in which its work is queued; at the end all of them have been waited for."""
        if device.type != "cuda":
            yield [nullcontext()] * count
            return
        while len(self._streams) < min(count, STREAMS):
            self._streams.append(torch.cuda.Stream())
        streams, main = self._streams[:count], torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(main)
        try:
            yield [torch.cuda.stream(streams[i % len(streams)]) for i in range(count)]
        finally:  # also after a lack of memory: a capture ends with all its branches joined
            for stream in streams:
                main.wait_stream(stream)


class Stack(Branches, Vmapped):
    """Blocks of rows, each vectorised by vmap and compiled into kernels that serve all its rows at once.

    A function is compiled for each size of blocks that occurs: with the same number of clients in every round for one
    or two.
    """

    title = "vmap"
    sizes = (10, 5, 1)
