"""An augmented batch straight from the stored bytes: index, mirror, crop, normalise and lay out in one pass.

Everything a local step needs of its data in one launch: the step's number is read on the device, so that a captured
graph can replay it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedman.kernels.first_stage import padded_channels


@triton.jit(do_not_specialize=["S"])  # else compiled again for numbers of clients that 16 divides
def _gather(
    data, labels, index, sample, window, step, scale, shift, x, y, S, K, N,
    B: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    CROP: tl.constexpr, MARGIN: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sb = tl.program_id(1).to(tl.int64)
    s, b = sb // B, sb % B
    at = (s * K + tl.load(step)) * B + b
    image = tl.load(index + s * N + tl.load(sample + at))
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = i // (W + 2 * PADDING) - PADDING, i % (W + 2 * PADDING) - PADDING
    inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
    if CROP:
        plane = S * K * B
        mirror = tl.load(window + at)
        row += tl.load(window + plane + at).to(tl.int32) - MARGIN
        column += tl.load(window + 2 * plane + at).to(tl.int32) - MARGIN
        inside = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        column = tl.where(mirror != 0, W - 1 - column, column)
    c = tl.arange(0, CP)
    real = inside[:, None] & (c < C)[None, :]
    pixel = (image * H + row) * W + column
    v = tl.load(data + pixel[:, None] * C + c[None, :], mask=real, other=0).to(tl.float32)
    v = v * tl.load(scale + c, mask=c < C, other=0.0)[None, :] - tl.load(shift + c, mask=c < C, other=0.0)[None, :]
    v = tl.where(real, v, 0.0)
    v = tl.where((c == CP - 1)[None, :], 1.0, v)
    size = (H + 2 * PADDING) * (W + 2 * PADDING)
    tl.store(x + (sb * size + i[:, None]) * CP + c[None, :], v, mask=(i < size)[:, None])
    if tl.program_id(0) == 0:
        tl.store(y + sb, tl.load(labels + image))


def gather(
    data: Tensor,
    labels: Tensor,
    index: Tensor,
    sample: Tensor,
    window: Tensor,
    step: Tensor,
    affine: tuple[Tensor, Tensor],
    margin: int | None,
    padding: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Step number `step` [1] of a plan: images as `fedman.kernels.first_stage.prepare` makes them, and labels [S, B].

    data uint8 [n, H, W, C]; labels [n]; index [S, N] where each client's samples are; sample [S, K, B];
    window [3, S, K, B]; normalised as x·scale − shift with `affine` = (scale [C], shift [C]). `margin` is the zero
    padding that windows may reach into; None: images are not augmented.
    """
    clients, steps, batch = sample.shape
    height, width, channels = data.shape[1:]
    held, tall, wide = padded_channels(channels), height + 2 * padding, width + 2 * padding
    x = torch.empty(clients, batch, tall, wide, held, dtype=dtype, device=data.device)
    y = torch.empty(clients, batch, dtype=labels.dtype, device=data.device)
    block = 256
    _gather[(triton.cdiv(tall * wide, block), clients * batch)](
        data, labels, index, sample, window, step, *affine, x, y, clients, steps, index.shape[1],
        B=batch, H=height, W=width, C=channels, CP=held, CROP=margin is not None, MARGIN=margin or 0,
        PADDING=padding, BLOCK=block,
    )  # fmt: skip
    return x, y
