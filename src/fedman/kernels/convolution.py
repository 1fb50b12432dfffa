"""`conv2d` of S stacked models as operations that autograd and torch.compile know, on the kernels of `conv.py`.

The compiler sees four opaque operations on contiguous tensors. What it computes around them (norms, activations, sums)
it fuses with the transpositions from and to channels last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedman.kernels import conv
from fedman.kernels.stage import STORAGE, Stage


class StackedConv(torch.autograd.Function):
    """(x [S, B, C, H, W], w [S, O, C, k, k], stride, padding, precision of the products) ↦ z [S, B, O, OH, OW].

    The weights are float32 rows of parameters, which need not follow each other in memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, stride: int, padding: int, precision: str) -> Tensor:
        pixels, packed = _last(x), pack(w, precision)
        ctx.save_for_backward(pixels, packed)
        ctx.geometry = w.shape[-1], stride, padding, precision
        return _first(forward(pixels, packed, *ctx.geometry))

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        (pixels, packed), dz = ctx.saved_tensors, _last(dz)
        size = list(pixels.shape[2:4])
        dx = _first(input_gradient(dz, packed, size, *ctx.geometry)) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            kernel = ctx.geometry[0]
            total = weight_gradient(pixels, dz, *ctx.geometry).sum(1)
            dw = total.unflatten(2, (kernel, kernel, -1)).permute(0, 1, 4, 2, 3)
        return dx, dw, None, None, None


@torch.library.custom_op("fedman::conv_pack", mutates_args=())
def pack(w: Tensor, precision: str) -> Tensor:
    """Weights as [S, O, k·k·C] in the type of the operands."""
    rows = w.flatten(1) if w[0].is_contiguous() else w.contiguous().flatten(1)
    return conv.pack(rows, Stage(1, 1, w.shape[2], w.shape[1], w.shape[3], 0), precision)


@torch.library.custom_op("fedman::conv_forward", mutates_args=())
def forward(x: Tensor, packed: Tensor, kernel: int, stride: int, padding: int, precision: str) -> Tensor:
    """z [S, B, OH, OW, O] of x [S, B, H, W, C]."""
    _check_contiguous(x)
    return conv.forward(_stage(x, packed.shape[1], kernel, stride, padding), x, packed, None, precision)


@torch.library.custom_op("fedman::conv_input_gradient", mutates_args=())
def input_gradient(
    dz: Tensor, packed: Tensor, size: list[int], kernel: int, stride: int, padding: int, precision: str
) -> Tensor:
    """dF/dx [S, B, *size, C]."""
    _check_contiguous(dz)
    height, width = size
    stage = Stage(height, width, packed.shape[2] // kernel**2, packed.shape[1], kernel, padding, stride=stride)
    return conv.input_gradient(stage, dz, packed, precision)


@torch.library.custom_op("fedman::conv_weight_gradient", mutates_args=())
def weight_gradient(x: Tensor, dz: Tensor, kernel: int, stride: int, padding: int, precision: str) -> Tensor:
    """Partial sums [S, parts, O, k·k·C] of dF/dw, in float32."""
    _check_contiguous(x, dz)
    return conv.weight_gradient(_stage(x, dz.shape[-1], kernel, stride, padding), x, dz, precision)


@pack.register_fake
def _(w: Tensor, precision: str) -> Tensor:
    return w.new_empty(*w.shape[:2], w.shape[2:].numel(), dtype=STORAGE[precision])


@forward.register_fake
def _(x: Tensor, packed: Tensor, kernel: int, stride: int, padding: int, precision: str) -> Tensor:
    stage = _stage(x, packed.shape[1], kernel, stride, padding)
    return x.new_empty(*x.shape[:2], *stage.map, stage.out)


@input_gradient.register_fake
def _(dz: Tensor, packed: Tensor, size: list[int], kernel: int, *_: Any) -> Tensor:
    return dz.new_empty(*dz.shape[:2], *size, packed.shape[2] // kernel**2)


@weight_gradient.register_fake
def _(x: Tensor, dz: Tensor, kernel: int, stride: int, padding: int, precision: str) -> Tensor:
    stage = _stage(x, dz.shape[-1], kernel, stride, padding)
    parts = conv.weight_parts(stage, len(x), x.shape[1], precision)
    return x.new_empty(len(x), parts, stage.out, stage.depth, dtype=torch.float32)


def _check_contiguous(*tensors: Tensor) -> None:
    """The kernels know sizes and no strides, and a compiler may choose a layout."""
    if not all(v.is_contiguous() for v in tensors):
        raise ValueError("a convolution's tensors must be contiguous")


def _stage(x: Tensor, out: int, kernel: int, stride: int, padding: int) -> Stage:
    height, width, channels = x.shape[2:]
    return Stage(height, width, channels, out, kernel, padding, stride=stride)


def _last(x: Tensor) -> Tensor:
    """[S, B, H, W, C] of images [S, B, C, H, W]."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def _first(x: Tensor) -> Tensor:
    """[S, B, C, H, W] of images [S, B, H, W, C]."""
    return x.permute(0, 1, 4, 2, 3).contiguous()
