"""The machine around a run: device, precision, signals, logs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fedman.errors import UserError

if TYPE_CHECKING:
    from fedman.records import RunFolder


def pick_device(name: str) -> str:
    """ "auto" is CUDA where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device: no CUDA device is available; use auto or cpu")
    if name not in ("cpu", "cuda"):
        raise UserError(f"device: {name!r} is not one of auto, cpu, cuda")
    return name


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
def stop_on_signal(stopping: threading.Event) -> Iterator[list[int]]:
    """SIGINT and SIGTERM set `stopping`, which ends a round early; the list holds the signal. A second one kills."""
    caught: list[int] = []

    def handle(signum: int, frame: object) -> None:
        for s in before:
            signal.signal(s, signal.SIG_DFL)
        caught.append(signum)
        stopping.set()

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for s, old in before.items():
            signal.signal(s, old)


def device_name(device: torch.device) -> str:
    """A device as a person would name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"


@contextmanager
def tensorboard(folder: RunFolder) -> Iterator[Any]:
    """A TensorBoard writer into the run's folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("tensorboard: not installed; pip install 'fedman[tensorboard]'") from None
    with SummaryWriter(str(folder.path / "tensorboard")) as writer:
        yield writer


def log_round(log: Any, record: dict[str, Any]) -> None:
    """One record as TensorBoard scalars."""
    scalars = {"loss": record["loss"], "lr": record["lr"]}
    scalars |= {f"accuracy/{k}": v for k, v in record["accuracy"].items()}
    scalars |= {f"man/{k}": v for k, v in record["man"].items()}
    for name, value in scalars.items():
        log.add_scalar(name, value, record["round"])
