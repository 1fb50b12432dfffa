"""Local steps on a GPU as replays of one captured CUDA graph: no Python and no host sync between the steps.

A graph has fixed shapes, addresses and numbers. So there is one graph per shape of the inputs (that is, per number of
clients) and per value that is no input, its inputs are copied to their places once a round (graphs share them, since
only one runs at a time), and the step's number is a counter on the device. A graph holds a few steps, so that what they
carry on is copied back to its place less often. A step that cannot be captured (a user's model may ask the host
something) runs step by step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Inputs = Mapping[str, Tensors]
Step = Callable[[Inputs, Tensor, Tensors], Tensors]
"""step(inputs, j, carry) -> carry: the pure step number j `[1]`."""


class Graphs:
    """Captured steps by the shapes of their inputs. They share their memory, since only one runs at a time."""

    def __init__(self) -> None:
        self._captured: dict[object, _Captured | None] = {}
        self._rooms: dict[object, Tensor] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # one for all captures: what is freed on a stream serves that stream alone

    def clear(self) -> None:
        """Let go of all graphs and their memory."""
        self._captured.clear()
        self._rooms.clear()
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    def run(self, step: Step, inputs: Inputs, carry: Tensors, steps: int, fixed: Hashable = None) -> dict[str, Tensor]:
        """The carry after `steps` steps. `fixed` tells steps apart whose inputs have the same shapes."""
        shapes = tuple((group, name, v.shape) for group, tensors in inputs.items() for name, v in tensors.items())
        key = fixed, shapes
        if key not in self._captured:
            several = next(n for n in (5, 4, 3, 2, 1) if steps % n == 0)
            try:
                self._captured[key] = _Captured(step, inputs, carry, several, self._place, self._pool, self._stream)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._captured[key] = None
                warnings.warn(f"no CUDA graph of this model, which is slower: {error}", stacklevel=2)
        captured = self._captured[key]
        if captured is not None:
            return captured.replay(inputs, carry, steps)
        for j in range(steps):
            device = next(iter(carry.values())).device
            carry = step(inputs, torch.full((1,), j, device=device), carry)
        return dict(carry)

    def _place(self, group: str, name: str, v: Tensor) -> Tensor:
        """Where a graph has v: the first rows of a room that graphs of other sizes use too."""
        if not v.ndim:
            return v.clone()
        key = group, name, v.dtype, v.shape[1:]
        room = self._rooms.get(key)
        if room is None or len(room) < len(v):
            room = self._rooms[key] = v.new_empty(len(v) * 5 // 4, *v.shape[1:])
        return room[: len(v)].copy_(v)


class _Captured:
    def __init__(
        self, step: Step, inputs: Inputs, carry: Tensors, several: int, place: Callable[[str, str, Tensor], Tensor],
        pool: Any, stream: torch.cuda.Stream,
    ) -> None:  # fmt: skip
        self.several = several
        self.inputs = {
            group: {name: place(group, name, v) for name, v in tensors.items()} for group, tensors in inputs.items()
        }
        self.carry = {name: place("carry", name, v) for name, v in carry.items()}
        device = next(iter(self.carry.values())).device
        self.j = torch.zeros(1, dtype=torch.int64, device=device)
        self.graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(self.inputs, self.j, self.carry)  # kernels are compiled and libraries set up outside the capture
            stream.synchronize()
            self.graph.capture_begin(pool)  # torch.cuda.graph would empty the memory's cache for every size of cohort
            try:
                self._record(step)
            except BaseException:
                with suppress(RuntimeError):  # of a capture that broke off; what broke it says more
                    self.graph.capture_end()
                raise
            self.graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def _record(self, step: Step) -> None:
        now: Tensors = self.carry
        for _ in range(self.several):
            now = step(self.inputs, self.j, now)
            self.j.add_(1)
        for name, v in now.items():
            self.carry[name].copy_(v)

    def replay(self, inputs: Inputs, carry: Tensors, steps: int) -> dict[str, Tensor]:
        for group, tensors in inputs.items():
            for name, v in tensors.items():
                self.inputs[group][name].copy_(v)
        for name, v in carry.items():
            self.carry[name].copy_(v)
        self.j.zero_()
        for _ in range(steps // self.several):
            self.graph.replay()
        return {name: v.clone() for name, v in self.carry.items()}
