"""Convolutions whose second derivatives use the same kernels as their first.

⟨g, x ∗ w⟩ is linear in each of g, x and w. Its derivative by g is the convolution x ∗ w, and those by x and w are the
two gradients of a backward pass. Each is linear in the two other factors, with derivatives that are again one of the
three: a double backward pass needs nothing else.

PyTorch's own second derivative computes the gradient by w as a convolution with kernels as large as the image and as
many channels as there are samples, which is slow on GPUs, and also computes a derivative by the model's input that is
never used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
OPTIONS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
ARGUMENTS: dict[str, Any] = {"input": None, "weight": None, **OPTIONS}  # of these functions, with their defaults
Geometry = tuple[list[int], list[int], list[int], int]  # stride, padding, dilation, groups
BY_G, BY_X, BY_W = range(3)


class Derivative(Function):
    """The derivative of ⟨g, x ∗ w⟩ by one of its factors, of which only the shape is used."""

    @staticmethod
    def forward(ctx: Any, by: int, geometry: Geometry, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(g, x, w)
        ctx.by, ctx.geometry = by, geometry
        stride, padding, dilation, groups = geometry
        options = stride, padding, dilation, False, [0] * len(stride), groups
        if by == BY_G:
            return torch.ops.aten.convolution(x, w, None, *options)
        wanted = [by == BY_X, by == BY_W, False]
        by_x, by_w, _ = torch.ops.aten.convolution_backward(g, x, w, None, *options, wanted)
        return by_x if by == BY_X else by_w

    @staticmethod
    def backward(ctx: Any, h: Tensor) -> tuple[Tensor | None, ...]:
        factors = list(ctx.saved_tensors)
        factors[ctx.by] = h

        def derivative(by: int) -> Tensor:
            shape = h.new_empty(1).expand(factors[by].shape)
            return Derivative.apply(by, ctx.geometry, *factors[:by], shape, *factors[by + 1 :])

        needed = ctx.needs_input_grad[2:]
        return None, None, *(derivative(by) if needed[by] else None for by in (BY_G, BY_X, BY_W))


class Convolutions(TorchFunctionMode):
    """Within this context a model's convolutions are the ones above; unbatched ones and named padding are not."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        axes = CONVOLUTIONS.get(func)
        if axes is not None:
            given = dict(zip(ARGUMENTS, args, strict=False)) | (kwargs or {})
            x, w, bias, stride, padding, dilation, groups = (ARGUMENTS | given).values()
            if x.ndim == axes + 2 and not isinstance(padding, str):
                sizes = [[n] * axes if isinstance(n, int) else list(n) for n in (stride, padding, dilation)]
                y = Derivative.apply(BY_G, (*sizes, groups), x.new_empty(0), x, w)
                return y if bias is None else y + bias.view(-1, *[1] * axes)
        return func(*args, **(kwargs or {}))
