"""Weight norm with a right second derivative: that of PyTorch's own kernel takes some of the norms for constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WeightNorms(TorchFunctionMode):
    """Within this context weights v·g/‖v‖ are computed by the plain formula."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        return _normed(*args, **given) if func is torch._weight_norm else func(*args, **given)


def _normed(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`torch._weight_norm`: the norms are over all dimensions but `dim`, with −1 over all."""
    return v * (g / torch.norm_except_dim(v, 2, dim))
