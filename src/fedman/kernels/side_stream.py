"""A second CUDA stream, for kernels whose results are not needed until the end of the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


class SideStream:
    """Runs work concurrently with the current stream, after all that was issued there before; `join` waits for it.

    Memory freed on the current stream may be reused there at once, so the tensors that the work reads are referenced
    until `join`. Forks and joins can be captured in a CUDA graph. Without CUDA the work runs in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _stream(device) if device.type == "cuda" else None
        self.held: list[Any] = []

    @contextmanager
    def work(self, *reads: Any) -> Iterator[None]:
        self.held.append(reads)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.held.clear()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device: memory freed on a stream is reused by that stream only."""
    return torch.cuda.Stream(device)
