"""The device of a run: which one, in which precision, on how many threads."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from fedman import kernels
from fedman.errors import UserError


def pick_device(name: str) -> str:
    """ "cpu" or "cuda", which is the current GPU; "auto" is CUDA where there is one, "cuda:1" makes GPU 1 current."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, number = name.partition(":")
    if kind == "mps":
        raise UserError("device: mps has no float64, in which clients are summed; use cpu")
    if name != "cpu" and (kind != "cuda" or bool(colon) != (number.isascii() and number.isdecimal())):
        raise UserError(f"device: {name!r} is not one of auto, cpu, cuda, cuda:0, ...")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("device: no CUDA device is available; use auto or cpu")
    if number and int(number) >= (count := torch.cuda.device_count()):
        raise UserError(f"device: there is no {name}; the {count} here are cuda:0 to cuda:{count - 1}")
    if number:
        torch.cuda.set_device(int(number))
    return kind


def pick_precision(name: str, device: str, large: bool = False) -> str:
    """ "auto" is bf16 on a GPU that has it, and for a large model on a CPU that has it; fp32 elsewhere."""
    if name == "auto":
        if device == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            fast = large and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
        return "bf16" if fast else "fp32"
    if name == "tf32" and device != "cuda":
        raise UserError("precision: tf32 needs a CUDA device; use fp32")
    return name


def open_device(name: str) -> None:
    """Set up the GPU of this name, if it is one, and import the kernels for it. Errors are left to the run."""
    with suppress(Exception):
        device = torch.device(pick_device(name))
        if device.type == "cuda":
            torch.zeros(1, device=device)
        if kernels.available(device):
            importlib.import_module("fedman.kernels.convnet")


def device_name(device: torch.device) -> str:
    """A device as a person would name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = usual_threads()
    return f"cpu ({threads} {'thread' if threads == 1 else 'threads'})"


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """TF32 in CUDA's matrix products and convolutions, or not, for the time of a run."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, conv.allow_tf32
    matmul.allow_tf32 = conv.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, conv.allow_tf32 = before


@contextmanager
def determinism(enabled: bool, device: str) -> Iterator[None]:
    """On a GPU, for the time of a run: the same operations give the same bits, or the fastest kernels are used.

    Operations that have no deterministic kernel run all the same, with PyTorch's warning. On a CPU they all have one.
    """
    if device != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
    conv = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    mode = torch.get_deterministic_debug_mode()
    before = conv.deterministic, conv.benchmark, memory.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn" if enabled else "default")
    conv.deterministic, conv.benchmark, memory.fill_uninitialized_memory = enabled, not enabled, False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        conv.deterministic, conv.benchmark, memory.fill_uninitialized_memory = before


@contextmanager
def strictly_deterministic(enabled: bool) -> Iterator[None]:
    """Operations without a deterministic kernel are errors. Attention has one, which it uses in this mode alone."""
    if not (enabled and torch.are_deterministic_algorithms_enabled()):
        yield
        return
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


class _Usual:
    """How many threads torch has where nobody is in `one_thread_each`. Several runs may be in there at a time, each in
    a thread of its own, and torch tells a new thread the number that was set last: the first one notes it for all."""

    def __init__(self) -> None:
        self.lock, self.inside, self.threads = threading.Lock(), 0, 1


_USUAL = _Usual()


def usual_threads() -> int:
    """How many threads torch has, whoever is in `one_thread_each` meanwhile."""
    with _USUAL.lock:
        return _USUAL.threads if _USUAL.inside else torch.get_num_threads()


@contextmanager
def one_thread_each(device: torch.device) -> Iterator[None]:
    """On a CPU, parallel work is spread over clients, each on one thread: faster than threads inside a small
    convolution, and the result does not depend on the number of cores."""
    if device.type != "cpu":
        yield
        return
    with _USUAL.lock:
        if not _USUAL.inside:
            _USUAL.threads = torch.get_num_threads()
        _USUAL.inside += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _USUAL.lock:
            _USUAL.inside -= 1
            torch.set_num_threads(_USUAL.threads)
