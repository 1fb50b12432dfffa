"""A second CUDA stream for kernels that nothing on the main chain waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


class Aside:
    """Runs work beside the current stream, after all that was issued there before; `join` waits for it.

    Memory freed on the current stream may be reused there at once, so what the work reads is held until `join`.
    Forks and joins are captured in a CUDA graph. Without CUDA the work simply runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _second(device) if device.type == "cuda" else None
        self.held: list[Any] = []

    @contextmanager
    def work(self, *reads: Any) -> Iterator[None]:
        self.held.append(reads)
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.held.clear()


@cache
def _second(device: torch.device) -> torch.cuda.Stream:
    """One for all: what is freed on a stream serves that stream alone."""
    return torch.cuda.Stream(device)
