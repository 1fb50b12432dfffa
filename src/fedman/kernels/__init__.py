"""GPU kernels (Triton) that train S stacked clients of a `ConvNet` at once; each has a plain reference.

A library runs a grouped convolution as S small kernels and every ReLU, pool and mean of squares as a pass over
memory. Here one launch serves all clients, and what belongs together is computed while it is in registers.
Importing this package needs no Triton; the kernels are imported where they are used.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fedman.kernels.convnet import StackedConvNet
    from fedman.kernels.update import clip_update

__all__ = ["StackedConvNet", "available", "clip_update"]


def available(device: torch.device | str) -> bool:
    """Whether the kernels run on `device`: CUDA of compute capability 8.0 or more, with Triton installed."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def __getattr__(name: str) -> Any:
    if name == "StackedConvNet":
        from fedman.kernels.convnet import StackedConvNet

        return StackedConvNet
    if name == "clip_update":
        from fedman.kernels.update import clip_update

        return clip_update
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
