"""The first stage: convolution of images with few channels, [GroupNorm,] ReLU, MAN and 2×2 max-pool, fused.

The map before pooling is the largest tensor of the model (50 MB in bf16 for ten clients of the CIFAR CNN,
262 MB for Tiny-ImageNet) but cheap to compute: K = k·k·C is 75 or 27. So it is never written to memory. The forward
pass stores the pooled values and the place of each maximum; the backward pass recomputes the map, tile by tile, while
it accumulates the weight gradient. Images need no gradient.

GroupNorm is passed to these kernels as a scale and a shift for each sample and channel; `gram` computes them
beforehand, and converts the weight gradient for the normalised map into that for the map.

Images are prepared (`prepare`) with their zero padding and with one more channel, of ones: the bias is then the
weight of that channel at the central tap, and its gradient is computed with the others. The two outputs in one row of a
window share one patch of k × (k + 1) pixels, multiplied by the weights at two offsets (`conv.pack`): half the
loads, and they start at even pixels, so that they are 16 bytes wide.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fedman.kernels.stage import Launch, Stage
from fedman.kernels.tiles import (
    activation_gradient,
    affine,
    apart,
    dot,
    incoming,
    marked,
    pooled_at,
    pooled_place,
    pooled_value,
    relu,
    window,
)


def padded_channels(channels: int) -> int:
    """Channels of a prepared image: a power of two, with room for the ones."""
    return triton.next_power_of_2(channels + 1)


def prepare(x: Tensor, padding: int, dtype: torch.dtype) -> Tensor:
    """Images [..., H, W, C] as `dtype`, zero-padded, with more channels up to a power of two: zeros, the last ones."""
    channels = x.shape[-1]
    out = F.pad(x.to(dtype), (0, padded_channels(channels) - channels, *(padding,) * 4))
    out[..., -1] = 1
    return out


def prepared(stage: Stage) -> Stage:
    """The stage as it reads prepared images."""
    border, held = 2 * stage.padding, padded_channels(stage.channels)
    return replace(
        stage, height=stage.height + border, width=stage.width + border, channels=held, padding=0, image=stage.channels
    )


@triton.jit
def patches(
    x, n, qh, end,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, KS: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KP: tl.constexpr,
):  # fmt: skip
    """Pixels [BM, KP] under row qh of windows n: k rows of k + 1 pixels; column of the first; which rows exist."""
    RUN: tl.constexpr = (KS + 1) * C
    b, row, column = window(n, (OH + 1) // 2, (OW + 1) // 2)
    ok = n < end
    if OH % 2 == 1:
        ok = ok & (row + qh < OH)
    k = tl.arange(0, KP)
    mask = ok[:, None] & (k < KS * RUN)[None, :]
    if OW % 2 == 1:
        mask = mask & (column[:, None] + (k % RUN // C)[None, :] < W)
    start = ((b * H + row) * W + column) * C
    offset = (k // RUN + qh) * (W * C) + k % RUN
    return tl.load(x + start[:, None] + offset[None, :], mask=mask, other=0.0), column, ok


@triton.jit
def pair_rows(block, BO: tl.constexpr):
    """Rows of a tile of pairs: side (0 left, 1 right) and channel.

    Left and right alternate every eight channels: a thread then holds both outputs of a channel, and the whole window.
    """
    j = tl.arange(0, 2 * BO)
    return j // 8 % 2, block * BO + j // 16 * 8 + j % 8


@triton.jit
def pair_weights(w, s, side, o, O: tl.constexpr, KP: tl.constexpr):  # noqa: E741
    """Packed weights [rows, KP]."""
    return tl.load(w + ((s * 2 + side) * O + o)[:, None] * KP + tl.arange(0, KP)[None, :])


@triton.jit
def of_windows(rows, BO: tl.constexpr, BM: tl.constexpr):
    """The larger of left and right: marked rows [2·BO, BM] to windows [BM, BO]."""
    sides = tl.reshape(rows, (BO // 8, 2, 8, BM)) | (1 - tl.arange(0, 2))[None, :, None, None]
    return tl.trans(tl.reshape(tl.max(sides, 1), (BO, BM)))


@triton.jit
def of_rows(windows, side, BO: tl.constexpr, BM: tl.constexpr):
    """Gradients with places [BM, BO] to rows [2·BO, BM]: each on the side where its maximum was."""
    channels = tl.reshape(tl.trans(windows), (BO // 8, 1, 8, BM))
    rows = tl.reshape(tl.broadcast_to(channels, (BO // 8, 2, 8, BM)), (2 * BO, BM))
    return tl.where(((rows ^ side[:, None]) & 1) == 0, rows, 0)


@triton.jit
def _forward(
    x, w, share, stats, pooled, arg, man, B, man_stride, stride_px, stride_c,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, KS: tl.constexpr,  # noqa: E741
    OH: tl.constexpr, OW: tl.constexpr, NORM: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of windows (with GroupNorm, a sample) by BO channels."""
    WINDOWS: tl.constexpr = ((OH + 1) // 2) * ((OW + 1) // 2)
    chunk, block, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    x += s * B * (H * W * C)
    pooled += s * B * ((OH // 2) * (OW // 2) * O)
    arg += s * B * (WINDOWS * O)
    c = block * BO + tl.arange(0, BO)
    side, o = pair_rows(block, BO)
    weight = pair_weights(w, s, side, o, O, KP)
    zero = tl.zeros((2 * BO, BM), tl.float32)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, B * WINDOWS)
    scale = tl.full((2 * BO,), 1.0, tl.float32)
    shift = tl.zeros((2 * BO,), tl.float32)
    if NORM:
        stats += (s * B + chunk) * (4 * O)
        scale = tl.load(stats + 2 * O + o)
        shift = tl.load(stats + 3 * O + o)
    value = tl.zeros((2 * BO, BM), tl.float32)
    for start in range(0, CHUNK, BM):
        n = first + start + tl.arange(0, BM)
        squares = tl.zeros((2 * BO, BM), tl.float32)
        best = tl.zeros((2 * BO, BM), tl.int32)
        for qh in tl.static_range(2):
            patch, column, ok = patches(x, n, qh, end, H, W, C, KS, OH, OW, KP)
            z = dot(weight, tl.trans(patch), zero, PRECISION)
            a = relu(affine(z, scale[:, None], shift[:, None], NORM))
            if OW % 2 == 1:
                a = tl.where(column[None, :] + side[:, None] < OW, a, 0.0)
            if NORM and (OH % 2 == 1 or CHUNK % BM > 0):
                a = tl.where(ok[None, :], a, 0.0)
            if NORM:  # the chunk is one sample
                value += a * a
            else:
                squares += a * a
            best = marked(a, 2) if qh == 0 else tl.maximum(best, marked(a, 0))
        if not NORM:
            value += squares * tl.load(share + s * B + n // WINDOWS, mask=n < end, other=0.0)[None, :]
        top = of_windows(best, BO, BM)
        at, complete = pooled_at(n, c, stride_px, stride_c, OH, OW, O)
        tl.store(pooled + at, pooled_value(top), mask=((n < end) & complete)[:, None])
        tl.store(arg + n[:, None] * O + c[None, :], pooled_place(top), mask=(n < end)[:, None])
    total = tl.sum(tl.sum(value, 1), 0) / (OH * OW * O)
    if NORM:
        total *= tl.load(share + s * B + chunk)
    tl.store(man + s * man_stride + chunk * tl.num_programs(1) + block, total)


@triton.jit
def _backward(
    x, w, share, stats, grad, arg, dman, part, B, dman_stride, stride_px, stride_c,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, KS: tl.constexpr,  # noqa: E741
    OH: tl.constexpr, OW: tl.constexpr, NORM: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk's part of the weight gradient of BO channels, as if the normalised map were the map."""
    WINDOWS: tl.constexpr = ((OH + 1) // 2) * ((OW + 1) // 2)
    chunk, block, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    x += s * B * (H * W * C)
    share += s * B
    grad += s * B * ((OH // 2) * (OW // 2) * O)
    arg += s * B * (WINDOWS * O)
    c = block * BO + tl.arange(0, BO)
    side, o = pair_rows(block, BO)
    weight = pair_weights(w, s, side, o, O, KP)
    zero = tl.zeros((2 * BO, BM), tl.float32)
    strength = 2.0 * tl.load(dman + s * dman_stride)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, B * WINDOWS)
    scale = tl.full((2 * BO,), 1.0, tl.float32)
    shift = tl.zeros((2 * BO,), tl.float32)
    if NORM:
        stats += (s * B + chunk) * (4 * O)
        scale = tl.load(stats + 2 * O + o)
        shift = tl.load(stats + 3 * O + o)
    acc = tl.zeros((2 * BO, KP), tl.float32)
    for start in range(0, CHUNK, BM):
        n = first + start + tl.arange(0, BM)
        g, coef = incoming(grad, arg, share, strength, n, end, c, stride_px, stride_c, OH, OW, O)
        halves = apart(of_rows(g, side, BO, BM), 1)
        for qh in tl.static_range(2):
            patch, column, _ = patches(x, n, qh, end, H, W, C, KS, OH, OW, KP)
            y = affine(dot(weight, tl.trans(patch), zero, PRECISION), scale[:, None], shift[:, None], NORM)
            dy = activation_gradient(y, halves[qh], coef[None, :])
            if OW % 2 == 1:
                dy = tl.where(column[None, :] + side[:, None] < OW, dy, 0.0)
            acc = dot(dy, patch, acc, PRECISION)  # rows that do not exist have patches of zeros
    pair = (s * tl.num_programs(0) + chunk) * 2 + side
    tl.store(part + (pair * O + o)[:, None] * KP + tl.arange(0, KP)[None, :], acc)


def _options(stage: Stage, chunk: int, channels: int, warps: int, stages: int) -> Launch:
    """Windows and channels per tile, windows per program, warps, stages; limited by the registers."""
    return {
        "BM": 32, "BO": min(channels, stage.out), "CHUNK": stage.windows if stage.groups else chunk,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def forward_options(stage: Stage, precision: str) -> Launch:
    if precision == "bf16" and stage.kernel > 3:  # larger patches: all channels at once read them less often
        return _options(stage, 256, 64, 8, 2)
    return _options(stage, 256, 32, 4, 3 if precision == "bf16" else 1)


def backward_options(stage: Stage, precision: str, clients: int, batch: int) -> Launch:
    """About 400 chunks, three per multiprocessor of an H200: fewer leave it idle, more write more partial sums."""
    share = clients * batch * stage.windows * (stage.out // min(32, stage.out)) // 400
    chunk = min(1024, max(32, triton.next_power_of_2(share)))
    warps, stages = {"bf16": (4, 3), "tf32": (4, 1), "fp32": (8, 2)}[precision]  # in fp32 one stage spills registers
    return _options(stage, chunk, 32, warps, stages)


def parts(stage: Stage, batch: int, precision: str) -> int:
    """How many partial MAN sums `forward` writes per client."""
    options = forward_options(stage, precision)
    return stage.chunks(batch, options) * (stage.out // options["BO"])


def forward(
    stage: Stage, x: Tensor, w: Tensor, share: Tensor, stats: Tensor | None, man: Tensor,
    strides: tuple[int, int], precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Pooled output [S, B, pixels·O] and places of the maxima [S, B, windows, O].

    `w` [S, 2, O, KP] are the packed weights, `share` [S, B] each sample's weight in the batch mean, `stats`
    GroupNorm's (`gram.statistics`). Partial MAN sums go to `man` [S, parts]. `strides` are those of a pixel and of
    a channel in the pooled output.
    """
    clients, batch = share.shape
    options = forward_options(stage, precision)
    pooled = x.new_empty(clients, batch, stage.pooled * stage.out)
    arg = x.new_empty(clients, batch, stage.windows, stage.out, dtype=torch.int8)
    _forward[(stage.chunks(batch, options), stage.out // options["BO"], clients)](
        x, w, share, share if stats is None else stats, pooled, arg, man, batch, man.stride(0), *strides,
        **stage.constants(_forward), NORM=stats is not None, KP=stage.depth, PRECISION=precision, **options,
    )  # fmt: skip
    return pooled, arg


def backward(
    stage: Stage, x: Tensor, w: Tensor, share: Tensor, stats: Tensor | None, grad: Tensor, arg: Tensor,
    dman: Tensor, strides: tuple[int, int], precision: str,
) -> Tensor:  # fmt: skip
    """Partial gradients [S, 2·chunks, O, KP] (of pairs: `conv.unpack`) for the packed weights.

    `grad` is the gradient of the pooled output, `dman` [S] (any stride) that of the layer's MAN term. With
    GroupNorm a chunk is a sample, and `gram.gradient` has to follow.
    """
    clients, batch = share.shape
    options = backward_options(stage, precision, clients, batch)
    count = stage.chunks(batch, options)
    part = share.new_empty(clients, 2 * count, stage.out, stage.depth)
    _backward[(count, stage.out // options["BO"], clients)](
        x, w, share, share if stats is None else stats, grad, arg, dman, part, batch, dman.stride(0), *strides,
        **stage.constants(_backward), NORM=stats is not None, KP=stage.depth, PRECISION=precision, **options,
    )  # fmt: skip
    return part
