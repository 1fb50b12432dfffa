"""The first stage: convolution of images with few channels, [GroupNorm,] ReLU, MAN and 2×2 max-pool, fused.

The map before pooling is the largest tensor of the model (50 MB in bf16 for ten clients of the CIFAR CNN,
262 MB for Tiny-ImageNet) but cheap to compute: K = k·k·C is 75 or 27. So it never goes to memory. The forward
pass keeps the pooled values and the place of each maximum; the backward pass computes the map again, tile by
tile, while it accumulates the weight gradient. Images need no gradient.

Images are prepared (`prepare`) with their zero padding and with one more channel, of ones: the bias is then the
weight of that channel at the central tap, and its gradient comes with the others. The two outputs in one row of a
window share one patch of k × (k + 1) pixels, multiplied with the weights in two places (`conv.pack`): half the
loads, and they start at even pixels, so that they are 16 bytes wide.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedman.kernels.stage import Launch, Stage
from fedman.kernels.tiles import (
    activation_gradient,
    affine,
    dot,
    group_sum,
    incoming,
    keep_max,
    moments,
    pooled_at,
    relu,
    window,
)


def padded_channels(channels: int) -> int:
    """Channels of a prepared image: those of the image, the ones, zeros up to a power of two."""
    return triton.next_power_of_2(channels + 1)


@triton.jit
def _prepare(
    x, out, total,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pixel, c = i // CP, i % CP
    w, row = pixel % (W + 2 * PAD) - PAD, pixel // (W + 2 * PAD)
    h, image = row % (H + 2 * PAD) - PAD, row // (H + 2 * PAD)
    inside = (i < total) & (c < C) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    v = tl.load(x + ((image * H + h) * W + w) * C + c, mask=inside, other=0.0)
    tl.store(out + i, tl.where(c == C, 1.0, v.to(tl.float32)), mask=i < total)


def prepare(x: Tensor, padding: int, dtype: torch.dtype) -> Tensor:
    """Images [..., H, W, C] as `dtype`, zero-padded, with a channel of ones after the C channels."""
    *batch, height, width, channels = x.shape
    held = padded_channels(channels)
    out = x.new_empty(*batch, height + 2 * padding, width + 2 * padding, held, dtype=dtype)
    grid = (triton.cdiv(out.numel(), 1024),)
    _prepare[grid](x.contiguous(), out, out.numel(), height, width, channels, held, padding, BLOCK=1024)
    return out


@triton.jit
def _patch(
    x, n, qh: tl.constexpr, end,
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
def _weights(w, s, qw: tl.constexpr, O: tl.constexpr, KP: tl.constexpr):  # noqa: E741
    """Weights [KP, O] of the output at column qw of a pair."""
    at = ((s * 2 + qw) * O + tl.arange(0, O))[:, None] * KP + tl.arange(0, KP)[None, :]
    return tl.trans(tl.load(w + at))


@triton.jit
def _valid(v, ok, column, qw: tl.constexpr, OW: tl.constexpr, G: tl.constexpr):
    """v with zeros where there is no output; without GroupNorm rows that do not exist are zero already."""
    if OW % 2 == 1:
        ok = ok & (column + qw < OW)
    if OW % 2 == 1 or G > 0:
        v = tl.where(ok[:, None], v, 0.0)
    return v


@triton.jit
def _forward(
    x, w, gamma, beta, share, pooled, arg, stats, man, B, P, man_stride, stride_px, stride_c,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, KS: tl.constexpr,  # noqa: E741
    OH: tl.constexpr, OW: tl.constexpr, G: tl.constexpr, EPS: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of windows; with GroupNorm a chunk is a sample, and the map is computed twice: sums, then values."""
    WINDOWS: tl.constexpr = ((OH + 1) // 2) * ((OW + 1) // 2)
    chunk, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x += s * B * (H * W * C)
    pooled += s * B * ((OH // 2) * (OW // 2) * O)
    arg += s * B * (WINDOWS * O)
    c = tl.arange(0, O)
    left, right = _weights(w, s, 0, O, KP), _weights(w, s, 1, O, KP)
    zero = tl.zeros((BM, O), tl.float32)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, B * WINDOWS)
    scale = tl.full((O,), 1.0, tl.float32)
    shift = tl.zeros((O,), tl.float32)
    if G > 0:
        total = tl.zeros((BM, O), tl.float32)
        squares = tl.zeros((BM, O), tl.float32)
        for start in range(0, CHUNK, BM):
            n = first + start + tl.arange(0, BM)
            for q in tl.static_range(4):
                if q % 2 == 0:
                    patch, column, ok = _patch(x, n, q // 2, end, H, W, C, KS, OH, OW, KP)
                z = dot(patch, left if q % 2 == 0 else right, zero, PRECISION)
                z = _valid(z, ok, column, q % 2, OW, 0)
                total += z
                squares += z * z
        mean, rstd = moments(tl.sum(total, 0), tl.sum(squares, 0), OH * OW * (O // G), EPS, G, O)
        stats += (s * B + chunk) * (2 * O)
        tl.store(stats + c, mean)
        tl.store(stats + O + c, rstd)
        scale = rstd * tl.load(gamma + s * P + c)
        shift = tl.load(beta + s * P + c) - mean * scale
    value = tl.zeros((BM, O), tl.float32)
    for start in range(0, CHUNK, BM):
        n = first + start + tl.arange(0, BM)
        best = tl.zeros((BM, O), tl.float32)
        place = tl.full((BM, O), 4, tl.int32)
        squares = tl.zeros((BM, O), tl.float32)
        part = tl.load(share + s * B + n // WINDOWS, mask=n < end, other=0.0)[:, None]
        for q in tl.static_range(4):
            if q % 2 == 0:
                patch, column, ok = _patch(x, n, q // 2, end, H, W, C, KS, OH, OW, KP)
            z = dot(patch, left if q % 2 == 0 else right, zero, PRECISION)
            a = _valid(relu(affine(z, scale, shift, G)), ok, column, q % 2, OW, G)
            squares += a * a
            best, place = keep_max(a, best, place, q)
        value += part * squares
        at, complete = pooled_at(n, c, stride_px, stride_c, OH, OW, O)
        tl.store(pooled + at, best, mask=((n < end) & complete)[:, None])
        tl.store(arg + n[:, None] * O + c[None, :], place.to(tl.int8), mask=(n < end)[:, None])
    tl.store(man + s * man_stride + chunk, tl.sum(tl.sum(value, 1), 0) / (OH * OW * O))


@triton.jit
def _backward(
    x, w, gamma, beta, share, grad, arg, stats, dman, wpart, npart, B, P, dman_stride, stride_px, stride_c,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, KS: tl.constexpr,  # noqa: E741
    OH: tl.constexpr, OW: tl.constexpr, G: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk's share of dW; with GroupNorm first the chunk's (sample's) dγ and dβ, which dz needs."""
    WINDOWS: tl.constexpr = ((OH + 1) // 2) * ((OW + 1) // 2)
    chunk, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x += s * B * (H * W * C)
    share += s * B
    grad += s * B * ((OH // 2) * (OW // 2) * O)
    arg += s * B * (WINDOWS * O)
    c = tl.arange(0, O)
    left, right = _weights(w, s, 0, O, KP), _weights(w, s, 1, O, KP)
    zero = tl.zeros((BM, O), tl.float32)
    strength = 2.0 * tl.load(dman + s * dman_stride)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, B * WINDOWS)
    out = s * tl.num_programs(0) + chunk
    scale = tl.full((O,), 1.0, tl.float32)
    shift = tl.zeros((O,), tl.float32)
    constant = tl.zeros((O,), tl.float32)
    slope = tl.zeros((O,), tl.float32)
    if G > 0:
        stats += (s * B + chunk) * (2 * O)
        mean = tl.load(stats + c)
        rstd = tl.load(stats + O + c)
        weighting = tl.load(gamma + s * P + c)
        scale = rstd * weighting
        shift = tl.load(beta + s * P + c) - mean * scale
        dbeta = tl.zeros((BM, O), tl.float32)
        dgamma = tl.zeros((BM, O), tl.float32)
        for start in range(0, CHUNK, BM):
            n = first + start + tl.arange(0, BM)
            g, place, coef = incoming(grad, arg, share, strength, n, end, c, stride_px, stride_c, OH, OW, O)
            for q in tl.static_range(4):
                if q % 2 == 0:
                    patch, column, ok = _patch(x, n, q // 2, end, H, W, C, KS, OH, OW, KP)
                z = dot(patch, left if q % 2 == 0 else right, zero, PRECISION)
                dy = activation_gradient(affine(z, scale, shift, G), g, place, q, coef)
                dy = _valid(dy, ok, column, q % 2, OW, G)
                dbeta += dy
                dgamma += dy * (z - mean[None, :])
        dbeta_c = tl.sum(dbeta, 0)
        dgamma_c = tl.sum(dgamma, 0) * rstd
        tl.store(npart + out * (2 * O) + c, dgamma_c)
        tl.store(npart + out * (2 * O) + O + c, dbeta_c)
        entries: tl.constexpr = OH * OW * (O // G)
        slope = rstd * rstd * group_sum(dgamma_c * weighting, G, O) / entries
        constant = rstd * group_sum(dbeta_c * weighting, G, O) / entries - mean * slope
    dleft, dright = tl.zeros((KP, O), tl.float32), tl.zeros((KP, O), tl.float32)
    for start in range(0, CHUNK, BM):
        n = first + start + tl.arange(0, BM)
        g, place, coef = incoming(grad, arg, share, strength, n, end, c, stride_px, stride_c, OH, OW, O)
        for q in tl.static_range(4):
            if q % 2 == 0:
                patch, column, ok = _patch(x, n, q // 2, end, H, W, C, KS, OH, OW, KP)
            z = dot(patch, left if q % 2 == 0 else right, zero, PRECISION)
            dz = activation_gradient(affine(z, scale, shift, G), g, place, q, coef)
            if G > 0:
                dz = dz * scale[None, :] - constant[None, :] - z * slope[None, :]
            dz = _valid(dz, ok, column, q % 2, OW, 0)  # a row that does not exist has a patch of zeros
            if q % 2 == 0:
                dleft = dot(tl.trans(patch), dz, dleft, PRECISION)
            else:
                dright = dot(tl.trans(patch), dz, dright, PRECISION)
    at = out * (2 * O * KP) + c[:, None] * KP + tl.arange(0, KP)[None, :]
    tl.store(wpart + at, tl.trans(dleft))
    tl.store(wpart + O * KP + at, tl.trans(dright))


def _constants(stage: Stage) -> dict[str, int]:
    """The stage's constants; its images carry their padding, so the kernels know of none."""
    return {key: value for key, value in stage.constants.items() if key != "PAD"}


def launch(stage: Stage, precision: str, backward: bool) -> Launch:
    """Tile sizes by shape: windows a tile, windows a program, warps. Exact products have no tensor cores to fill."""
    tile = 16 if precision == "ieee" else 64
    warps = 8 if backward or stage.groups else 4
    chunk = stage.windows if stage.groups else (512 if backward else 64)
    return {"BM": tile, "CHUNK": chunk, "num_warps": warps, "num_stages": 2}


def chunks(stage: Stage, batch: int, options: Launch) -> int:
    """Programs a client: how many partial results the kernels write."""
    return triton.cdiv(batch * stage.windows, options["CHUNK"])


def forward(
    stage: Stage, x: Tensor, w: Tensor, norm: tuple[Tensor, Tensor] | None, share: Tensor, man: Tensor,
    strides: tuple[int, int], precision: str, options: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Pooled output [S, B, pixels·O], places of the maxima [S, B, windows, O], statistics [S, B, 2, O].

    `w` [S, 2, O, KP] are the packed weights, `norm` GroupNorm's scale and shift (rows of the flat parameters),
    `share` [S, B] each sample's part of the batch mean. Partial MAN sums go to `man` [S, chunks].
    `strides` are those of a pixel and of a channel in the pooled output.
    """
    clients, batch = share.shape
    options = options or launch(stage, precision, backward=False)
    pooled = x.new_empty(clients, batch, stage.pooled * stage.out)
    arg = x.new_empty(clients, batch, stage.windows, stage.out, dtype=torch.int8)
    stats = share.new_empty(clients, batch if norm else 0, 2, stage.out)
    gamma, beta = norm or (share, share)
    _forward[(chunks(stage, batch, options), clients)](
        x, w, gamma, beta, share, pooled, arg, stats, man, batch, gamma.stride(0), man.stride(0), *strides,
        **_constants(stage), G=stage.groups, EPS=stage.eps, KP=w.shape[-1], PRECISION=precision, **options,
    )  # fmt: skip
    return pooled, arg, stats


def backward(
    stage: Stage, x: Tensor, w: Tensor, norm: tuple[Tensor, Tensor] | None, share: Tensor, grad: Tensor,
    arg: Tensor, stats: Tensor, dman: Tensor, strides: tuple[int, int], precision: str,
    options: Launch | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Partial weight gradients [S, 2·chunks, O, KP] (of pairs: `conv.unpack`) and partial (dγ, dβ) [S, chunks, 2, O].

    `grad` is the gradient of the pooled output, `dman` [S] (any stride) that of the layer's MAN term.
    """
    clients, batch = share.shape
    options = options or launch(stage, precision, backward=True)
    parts = chunks(stage, batch, options)
    wpart = share.new_empty(clients, 2 * parts, stage.out, w.shape[-1])
    npart = share.new_empty(clients, parts if norm else 0, 2, stage.out)
    gamma, beta = norm or (share, share)
    _backward[(parts, clients)](
        x, w, gamma, beta, share, grad, arg, stats, dman, wpart, npart, batch, gamma.stride(0), dman.stride(0),
        *strides, **_constants(stage), G=stage.groups, KP=w.shape[-1], PRECISION=precision, **options,
    )  # fmt: skip
    return wpart, npart
