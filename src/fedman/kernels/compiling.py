"""Kernels compiled side by side before they are needed.

Triton compiles a kernel when it is first launched: the first step of a run would compile some thirty, one after the
other, which takes longer than most runs' rounds. Threads are enough to compile them at the same time, since the
passes of the compiler, the assembler and the C compiler of the launchers all run outside the interpreter's lock.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction


@contextmanager
def side_by_side() -> Iterator[None]:
    """What this thread launches inside is compiled and loaded, all at the same time, and not run: what the kernels
    would write stays uninitialised.

    A kernel that cannot be compiled raises its error when it is launched outside.
    """
    here, run = threading.get_ident(), JITFunction.run

    def compile_only(self, *args, warmup, **kwargs):
        return run(self, *args, warmup=warmup or threading.get_ident() == here, **kwargs)

    on_this_gpu = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else None
    pool = ThreadPoolExecutor(initializer=on_this_gpu)
    JITFunction.run = compile_only
    try:
        with pool, triton.AsyncCompileMode(_Loading(pool), ignore_errors=True):
            yield
    finally:
        JITFunction.run = run


class _Loading:
    """An executor that also loads what it compiled onto the GPU, which Triton leaves to the first launch."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool

    def submit(self, compiled: Callable[[], Any]) -> Future[Any]:
        return self.pool.submit(self._loaded, compiled)

    def _loaded(self, compiled: Callable[[], Any]) -> Any:
        kernel = compiled()
        _ = kernel.run  # a property, made on first access
        return kernel
