"""GPU kernels (Triton) that train S stacked clients of a `ConvNet` at once; tests compare each with plain PyTorch.

cuDNN runs a grouped convolution as S small kernels, and every ReLU, pool and mean of squares is one more pass over
memory. Here one launch serves all clients, and operations that follow each other are computed while the values are in
registers. Importing this package needs no Triton; its modules do, and are imported where they are used.
"""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on `device`: CUDA of compute capability 8.0 or more, with Triton installed."""
    if device.type != "cuda" or torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
