"""Local steps on a GPU as replays of one captured CUDA graph: no Python and no host sync between the steps.

A graph has fixed shapes, types, addresses and numbers. So there is one graph per shape and type of the inputs (that is,
per number of clients) and per value that is no input, its inputs are copied to their places once a round (graphs share
them, since only one runs at a time), and the step's number is a counter on the device. A graph holds a few steps, so
that what they carry on is copied back to its place less often. What is computed after the last step is a graph of its
own. A step that cannot be captured (a user's model may ask the host something) runs step by step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedman.errors import one_line

Value = TypeVar("Value")
Tensors = Mapping[str, Tensor]
Inputs = Mapping[str, Tensors]
Step = Callable[[Inputs, Any, Tensors], Tensors]


@dataclass(frozen=True)
class Steps:
    """Steps to take, one after the other."""

    step: Step  # step(inputs, j, carry) -> carry: the pure step number j `[1]`
    inputs: Inputs
    carry: Tensors  # before the first
    count: int
    fixed: Hashable = None  # tells steps apart whose tensors have the same shapes and types
    figures: Step = lambda inputs, j, carry: {}  # figures(inputs, 0, carry): what is computed after the last step

    @property
    def device(self) -> torch.device:
        return next(v.device for tensors in self.inputs.values() for v in tensors.values())


class Graphs:
    """Captured steps by the shapes and types of their inputs. They share memory, since only one runs at a time."""

    def __init__(self) -> None:
        self._captured: dict[object, _Captured | None] = {}
        self._rooms: dict[object, Tensor] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # one for all captures: what is freed on a stream serves that stream alone

    def clear(self) -> None:
        """Free all graphs and their memory."""
        self._captured.clear()
        self._rooms.clear()
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    def capture(self, steps: Steps) -> _Captured | None:
        """The graph of these steps; None where they cannot be captured.

        What a graph needs of memory is taken from what the graphs before it hold, if the pieces are large enough.
        Where steps of several sizes are to come, capture the largest first.
        """
        named = ((group, name, v) for group, tensors in steps.inputs.items() for name, v in tensors.items())
        key = steps.fixed, tuple((group, name, v.shape, v.dtype) for group, name, v in named)
        if key not in self._captured:
            try:
                self._captured[key] = _Captured(steps, self._place, self._pool, self._stream)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._captured[key] = None
                self._pool = torch.cuda.graph_pool_handle()  # into that of a failed capture PyTorch takes no other
                warnings.warn(f"no CUDA graph of this model, which is slower: {one_line(error)}", stacklevel=2)
        return self._captured[key]

    def run(self, steps: Steps) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The carry after all steps, and the figures."""
        captured = self.capture(steps)
        if captured is not None:
            return captured.replay(steps)
        carry, device = steps.carry, steps.device
        for j in range(steps.count):
            carry = steps.step(steps.inputs, torch.full((1,), j, device=device), carry)
        return dict(carry), dict(steps.figures(steps.inputs, torch.zeros(1, dtype=torch.int64, device=device), carry))

    def _place(self, group: str, name: str, v: Tensor) -> Tensor:
        """Where a graph has v: the first rows of a room that graphs of other sizes use too."""
        if not v.ndim:
            return v.clone()
        key = group, name, v.dtype, v.shape[1:]
        room = self._rooms.get(key)
        if room is None or len(room) < len(v):
            room = self._rooms[key] = v.new_empty(v.shape)
        return room[: len(v)].copy_(v)


class _Captured:
    def __init__(
        self, steps: Steps, place: Callable[[str, str, Tensor], Tensor], pool: Any, stream: torch.cuda.Stream
    ) -> None:
        self.several = next(n for n in (5, 4, 3, 2, 1) if steps.count % n == 0)
        self.inputs = {
            group: {name: place(group, name, v) for name, v in tensors.items()}
            for group, tensors in steps.inputs.items()
        }
        self.carry = {name: place("carry", name, v) for name, v in steps.carry.items()}
        self.j = torch.zeros(1, dtype=torch.int64, device=steps.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and libraries set up outside the capture
            steps.step(self.inputs, self.j, self.carry)
            steps.figures(self.inputs, self.j, self.carry)
            stream.synchronize()
            self.graph, _ = _record(lambda: self._steps(steps), pool)
            self.last, self.figures = _record(lambda: self._figures(steps), pool)
        torch.cuda.current_stream().wait_stream(stream)

    def _steps(self, steps: Steps) -> None:
        now: Tensors = self.carry
        for _ in range(self.several):
            now = steps.step(self.inputs, self.j, now)
            self.j.add_(1)
        for name, v in now.items():
            self.carry[name].copy_(v)

    def _figures(self, steps: Steps) -> Tensors:
        return steps.figures(self.inputs, self.j.zero_(), self.carry)

    def replay(self, steps: Steps) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        for group, tensors in steps.inputs.items():
            for name, v in tensors.items():
                self.inputs[group][name].copy_(v)
        for name, v in steps.carry.items():
            self.carry[name].copy_(v)
        self.j.zero_()
        for _ in range(steps.count // self.several):
            self.graph.replay()
        if self.figures:
            self.last.replay()
        return _cloned(self.carry), _cloned(self.figures)


def _cloned(tensors: Tensors) -> dict[str, Tensor]:
    return {name: v.clone() for name, v in tensors.items()}


def _record(work: Callable[[], Value], pool: Any) -> tuple[torch.cuda.CUDAGraph, Value]:
    """What `work` does on the current stream as a graph, and the tensors it returns, which every replay writes."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool)  # torch.cuda.graph would empty the memory's cache for every size of cohort
    try:
        value = work()
    except BaseException:
        try:
            graph.capture_end()
        except RuntimeError:  # of a capture that broke off; what broke it says more
            with suppress(Exception):
                _release(pool)
        raise
    graph.capture_end()
    return graph, value


def _release(pool: Any) -> None:
    """What PyTorch does at the end of a capture, but not of one that broke off: the allocator leaves the pool, and can
    free memory again; random numbers on the GPU are no longer drawn for a graph, which a capture that ends sees to."""
    device = torch.cuda.current_device()
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    torch.zeros(1, device="cuda")
    graph.capture_end()
