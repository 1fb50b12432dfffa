"""Convolutions whose second derivatives are made of the same kernels as their first.

A convolution y = x ∗ w is bilinear, and ⟨g, x ∗ w⟩ = ⟨GX(g, w), x⟩ = ⟨GW(g, x), w⟩ with two gradients GX, GW that are
bilinear again. The derivatives of each of the three are the other two: a double backward pass needs nothing else.
PyTorch's own second derivative computes GW as a convolution with kernels as large as the image and as many channels as
there are samples, which GPUs are slow at, and also a derivative by the model's input, which nobody asks for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
Geometry = tuple[list[int], list[int], list[int], int]  # stride, padding, dilation, groups


class Convolve(Function):
    """x ∗ w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, how: Geometry) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.how = how
        stride, padding, dilation, groups = how
        return torch.ops.aten.convolution(x, w, None, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        by_x, by_w, _ = ctx.needs_input_grad
        return (
            InputGradient.apply(g, w, x.shape, ctx.how) if by_x else None,
            WeightGradient.apply(g, x, w.shape, ctx.how) if by_w else None,
            None,
        )


class InputGradient(Function):
    """GX(g, w)."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, w: Tensor, shape: torch.Size, how: Geometry) -> Tensor:
        ctx.save_for_backward(g, w)
        ctx.how = how
        return _gradient(g, g.new_empty(1).expand(shape), w, how, (True, False))

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Tensor | None, ...]:
        g, w = ctx.saved_tensors
        by_g, by_w, *_ = ctx.needs_input_grad
        return (
            Convolve.apply(h, w, ctx.how) if by_g else None,
            WeightGradient.apply(g, h, w.shape, ctx.how) if by_w else None,
            None,
            None,
        )


class WeightGradient(Function):
    """GW(g, x)."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, shape: torch.Size, how: Geometry) -> Tensor:
        ctx.save_for_backward(g, x)
        ctx.how = how
        return _gradient(g, x, g.new_empty(1).expand(shape), how, (False, True))

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, x = ctx.saved_tensors
        by_g, by_x, *_ = ctx.needs_input_grad
        return (
            Convolve.apply(x, v, ctx.how) if by_g else None,
            InputGradient.apply(g, v, x.shape, ctx.how) if by_x else None,
            None,
            None,
        )


class Convolutions(TorchFunctionMode):
    """Within this context a model's convolutions are the ones above; those of other forms stay as they are."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        axes = CONVOLUTIONS.get(func)
        if axes is not None:
            x, w, bias, stride, padding, dilation, groups = _arguments(*args, **(kwargs or {}))
            if x.ndim == axes + 2 and not isinstance(padding, str):
                sizes = [[n] * axes if isinstance(n, int) else list(n) for n in (stride, padding, dilation)]
                y = Convolve.apply(x, w, (*sizes, groups))
                return y if bias is None else y + bias.view(-1, *[1] * axes)
        return func(*args, **(kwargs or {}))


def _arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, ...]:
    """The arguments of `torch.conv2d` and its like, in their order."""
    return input, weight, bias, stride, padding, dilation, groups


def _gradient(g: Tensor, x: Tensor, w: Tensor, how: Geometry, which: tuple[bool, bool]) -> Tensor:
    stride, padding, dilation, groups = how
    zeros, mask = [0] * len(stride), [*which, False]
    by_x, by_w, _ = torch.ops.aten.convolution_backward(
        g, x, w, None, stride, padding, dilation, False, zeros, groups, mask
    )
    return by_x if which[0] else by_w
