"""Functions that several kernels use: products in a given precision, ReLU, pool windows, GroupNorm statistics.

Shapes: a stage maps images [S, B, H, W, C] (channels last) to a map [S, B, OH, OW, O] and pools it. A tile is
`BM` 2×2 windows by all O channels; the windows of one client are numbered n = (b, window row, window column).
An odd map has incomplete windows at its edge: they count in MAN and have no pooled value.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a·b with fp32 accumulation; operands as bf16, as TF32, or as fp32.

    An fp32 operand is the sum of two TF32 values, and three of their four products on the tensor cores leave an error
    of 1e-6: twice as fast as fp32 outside them.
    """
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        return tl.dot(a, b, acc, input_precision="tf32" if PRECISION == "tf32" else "tf32x3")


@triton.jit
def relu(z):
    """max(z, 0) that propagates NaN, so that a diverged client shows in its loss."""
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def window(n, WH: tl.constexpr, WW: tl.constexpr):
    """Sample of the windows n, and row and column in the map of their first position."""
    n = n.to(tl.uint32)  # a cheaper division
    b, row = n // (WH * WW), n // WW
    return b.to(tl.int32), 2 * (row - b * WH).to(tl.int32), 2 * (n - row * WW).to(tl.int32)


@triton.jit
def pooled_at(n, c, stride_px, stride_c, OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr):  # noqa: E741
    """Offsets [BM, O] of the pooled values of windows n in one client's tensor, and which windows have one."""
    PIXELS: tl.constexpr = (OH // 2) * (OW // 2)
    if OH % 2 == 0 and OW % 2 == 0:  # pixels are numbered like windows, which the compiler can use
        b = (n.to(tl.uint32) // PIXELS).to(tl.int32)
        pixel = n - b * PIXELS
        complete = tl.full(n.shape, 1, tl.int1)
    else:
        b, row, column = window(n, (OH + 1) // 2, (OW + 1) // 2)
        pixel = row // 2 * (OW // 2) + column // 2
        complete = (row + 1 < OH) & (column + 1 < OW)
    return b[:, None] * (PIXELS * O) + pixel[:, None] * stride_px + c[None, :] * stride_c, complete


@triton.jit
def marked(a, mark):
    """Values a ≥ 0 as int32, their last two bits replaced by `mark`.

    Floats ≥ 0 are ordered like their bits, with NaN last, so one maximum yields value and place: the mark is 3 − q for
    position q of a window. Of equal values the first wins, as in PyTorch (flat patches of an image give equal values).
    """
    return (a.to(tl.int32, bitcast=True) & -4) | mark


@triton.jit
def pooled_value(best):
    """The maximum of a window."""
    return (best & -4).to(tl.float32, bitcast=True)


@triton.jit
def pooled_place(best):
    """The place 0..3 of the maximum, 4 where no value was positive."""
    return tl.where(best < 4, 4, 3 - (best & 3)).to(tl.int8)


@triton.jit
def affine(z, scale, shift, NORM: tl.constexpr):
    """The normalised map, z·scale + shift by channel; z itself without GroupNorm."""
    if NORM:
        return z * scale + shift
    else:
        return z


@triton.jit
def group_sum(v, G: tl.constexpr, O: tl.constexpr):  # noqa: E741
    """Sums of the channel vector v over its G groups, repeated for each channel: [O] to [O]."""
    total = tl.sum(tl.reshape(v, (G, O // G)), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (G, O // G)), (O,))


@triton.jit
def moments(total, squares, entries: tl.constexpr, EPS: tl.constexpr, G: tl.constexpr, O: tl.constexpr):  # noqa: E741
    """Mean and 1/σ of each channel's group from sums per channel; a group has `entries` values."""
    mean = group_sum(total, G, O) / entries
    variance = group_sum(squares, G, O) / entries - mean * mean
    return mean, 1.0 / tl.sqrt(tl.maximum(variance, 0.0) + EPS)


@triton.jit
def incoming(
    grad, arg, share, strength, n, end, c, stride_px, stride_c,
    OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """Inputs of the backward pass for windows n: pooled gradient with place [BM, BO], and MAN's 2ζ·share/n [BM].

    The place of the maximum is stored in the last two bits of the gradient, to save registers.
    """
    inside = n < end
    at, complete = pooled_at(n, c, stride_px, stride_c, OH, OW, O)
    g = tl.load(grad + at, mask=(inside & complete)[:, None], other=0.0).to(tl.float32)
    place = tl.load(arg + n[:, None] * O + c[None, :], mask=inside[:, None], other=4).to(tl.int32)
    b = n // (((OH + 1) // 2) * ((OW + 1) // 2))
    coef = strength / (OH * OW * O) * tl.load(share + b, mask=inside, other=0.0)
    return tl.where((place == 4) | (g == 0.0), 0, (g.to(tl.int32, bitcast=True) & -4) | place), coef


@triton.jit
def apart(g, bit: tl.constexpr):
    """Split gradients with places by one bit of the place: those with 0 there, those with 1 (elsewhere zero)."""
    zero = tl.where((g & (1 << bit)) == 0, g, 0)
    # Exact, since `zero` is g or 0. A float subtraction, because the integer units are the bottleneck.
    one = g.to(tl.float32, bitcast=True) - zero.to(tl.float32, bitcast=True)
    return zero, one.to(tl.int32, bitcast=True)


@triton.jit
def quarters(g):
    """Split gradients with places into those of the four positions of a window."""
    top, bottom = apart(g, 1)
    return apart(top, 0) + apart(bottom, 0)


@triton.jit
def activation_gradient(y, g, coef):
    """dF/dy: the pooled gradient g where this is the (positive) maximum, and MAN's dense 2ζ/n·relu(y)."""
    return g.to(tl.float32, bitcast=True) + coef * tl.maximum(y, 0.0)
