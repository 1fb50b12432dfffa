"""[GroupNorm,] ReLU, MAN and 2×2 max-pool of a stored map, forward and backward, one pass each.

The forward pass reads the map z once (twice from the cache with GroupNorm: a program owns a sample) and keeps the
pooled values and the place of each maximum. The backward pass writes dF/dz: MAN makes it dense,
dy = [y is the maximum]·g + 2ζ·share/n·relu(y), and GroupNorm couples the entries of a group.
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
    incoming,
    marked,
    pooled_at,
    pooled_place,
    pooled_value,
    quarters,
    relu,
    window,
)


@triton.jit
def _at(n, q: tl.constexpr, end, c, OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr):  # noqa: E741
    """Offsets of position q of windows n in one client's map, and which exist: both [BM, BO]."""
    b, row, column = window(n, (OH + 1) // 2, (OW + 1) // 2)
    ok = (n < end) & (row + q // 2 < OH) & (column + q % 2 < OW)
    at = ((b * OH + row + q // 2) * OW + column + q % 2)[:, None] * O + c[None, :]
    return at, tl.broadcast_to(ok[:, None], at.shape)


@triton.jit
def _forward(
    z, gamma, beta, share, pooled, arg, stats, man, B, P, man_stride, stride_px, stride_c,
    O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,  # noqa: E741
    CHUNK: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """One chunk of windows by BO channels; with GroupNorm, one group of a sample."""
    WINDOWS: tl.constexpr = ((OH + 1) // 2) * ((OW + 1) // 2)
    chunk, block, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks = tl.num_programs(1)
    z += s * B * (OH * OW * O)
    pooled += s * B * ((OH // 2) * (OW // 2) * O)
    arg += s * B * (WINDOWS * O)
    c = block * BO + tl.arange(0, BO)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, B * WINDOWS)
    scale = tl.full((BO,), 1.0, tl.float32)
    shift = tl.zeros((BO,), tl.float32)
    if NORM:
        total = tl.zeros((BM, BO), tl.float32)
        total_squares = tl.zeros((BM, BO), tl.float32)
        for start in range(0, CHUNK, BM):
            for q in tl.static_range(4):
                at, ok = _at(first + start + tl.arange(0, BM), q, end, c, OH, OW, O)
                v = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
                total += v
                total_squares += v * v
        mean = tl.sum(tl.sum(total, 1), 0) / (OH * OW * BO)
        variance = tl.sum(tl.sum(total_squares, 1), 0) / (OH * OW * BO) - mean * mean
        rstd = 1.0 / tl.sqrt(tl.maximum(variance, 0.0) + EPS)
        scale = rstd * tl.load(gamma + s * P + c)
        shift = tl.load(beta + s * P + c) - mean * scale
    value = tl.zeros((BM, BO), tl.float32)
    for start in range(0, CHUNK, BM):
        n = first + start + tl.arange(0, BM)
        best = tl.zeros((BM, BO), tl.int32)
        squares = tl.zeros((BM, BO), tl.float32)
        part = tl.load(share + s * B + n // WINDOWS, mask=n < end, other=0.0)[:, None]
        for q in tl.static_range(4):
            at, ok = _at(n, q, end, c, OH, OW, O)
            v = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
            a = tl.where(ok, relu(affine(v, scale[None, :], shift[None, :], NORM)), 0.0)
            squares += a * a
            best = tl.maximum(best, marked(a, 3 - q))
        value += part * squares
        at, complete = pooled_at(n, c, stride_px, stride_c, OH, OW, O)
        tl.store(pooled + at, pooled_value(best), mask=((n < end) & complete)[:, None])
        tl.store(arg + n[:, None] * O + c[None, :], pooled_place(best), mask=(n < end)[:, None])
    tl.store(man + s * man_stride + chunk * blocks + block, tl.sum(tl.sum(value, 1), 0) / (OH * OW * O))
    if NORM:
        stats += ((s * B + chunk) * blocks + block) * 2
        tl.store(stats, mean)
        tl.store(stats + 1, rstd)


@triton.jit
def _backward(
    z, gamma, beta, share, grad, arg, stats, dman, dz, bpart, npart, B, P, dman_stride, stride_px, stride_c,
    O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, NORM: tl.constexpr,  # noqa: E741
    CHUNK: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """dz of one chunk by BO channels; with GroupNorm first the group's dγ and dβ, which dz needs."""
    WINDOWS: tl.constexpr = ((OH + 1) // 2) * ((OW + 1) // 2)
    chunk, block, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    z += s * B * (OH * OW * O)
    dz += s * B * (OH * OW * O)
    share += s * B
    grad += s * B * ((OH // 2) * (OW // 2) * O)
    arg += s * B * (WINDOWS * O)
    c = block * BO + tl.arange(0, BO)
    strength = 2.0 * tl.load(dman + s * dman_stride)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, B * WINDOWS)
    out = s * tl.num_programs(0) + chunk
    scale = tl.full((BO,), 1.0, tl.float32)
    shift = tl.zeros((BO,), tl.float32)
    constant = 0.0
    slope = 0.0
    if NORM:
        stats += ((s * B + chunk) * tl.num_programs(1) + block) * 2
        mean = tl.load(stats)
        rstd = tl.load(stats + 1)
        weight = tl.load(gamma + s * P + c)
        scale = rstd * weight
        shift = tl.load(beta + s * P + c) - mean * scale
        sum_dy = tl.zeros((BM, BO), tl.float32)
        sum_dyz = tl.zeros((BM, BO), tl.float32)
        for start in range(0, CHUNK, BM):
            n = first + start + tl.arange(0, BM)
            g, coef = incoming(grad, arg, share, strength, n, end, c, stride_px, stride_c, OH, OW, O)
            places = quarters(g)
            for q in tl.static_range(4):
                at, ok = _at(n, q, end, c, OH, OW, O)
                v = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
                y = affine(v, scale[None, :], shift[None, :], NORM)
                dy = tl.where(ok, activation_gradient(y, places[q], coef[:, None]), 0.0)
                sum_dy += dy
                sum_dyz += dy * (v - mean)
        dbeta = tl.sum(sum_dy, 0)
        dgamma = tl.sum(sum_dyz, 0) * rstd
        slope = rstd * rstd * tl.sum(dgamma * weight, 0) / (OH * OW * BO)
        constant = rstd * tl.sum(dbeta * weight, 0) / (OH * OW * BO) - mean * slope
    bias = tl.zeros((BM, BO), tl.float32)
    for start in range(0, CHUNK, BM):
        n = first + start + tl.arange(0, BM)
        g, coef = incoming(grad, arg, share, strength, n, end, c, stride_px, stride_c, OH, OW, O)
        places = quarters(g)
        for q in tl.static_range(4):
            at, ok = _at(n, q, end, c, OH, OW, O)
            v = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
            y = affine(v, scale[None, :], shift[None, :], NORM)
            d = activation_gradient(y, places[q], coef[:, None])
            if NORM:
                d = d * scale[None, :] - constant - v * slope
            bias += tl.where(ok, d, 0.0)
            tl.store(dz + at, d, mask=ok)
    tl.store(bpart + out * O + c, tl.sum(bias, 0))
    if NORM:
        tl.store(npart + out * (2 * O) + c, dgamma)
        tl.store(npart + out * (2 * O) + O + c, dbeta)


def launch(stage: Stage, backward: bool) -> Launch:
    """Windows a tile, windows and channels a program, warps."""
    if stage.groups:
        tile = min(128 if backward else 256, triton.next_power_of_2(stage.windows))
        return {"BM": tile, "CHUNK": stage.windows, "BO": stage.out // stage.groups, "num_warps": max(4, tile // 16)}
    tile = 8 if backward else 32
    return {"BM": tile, "CHUNK": tile, "BO": stage.out, "num_warps": 2 if backward else 4}


def _chunks(stage: Stage, batch: int, options: Launch) -> int:
    return triton.cdiv(batch * stage.windows, options["CHUNK"])


def parts(stage: Stage, batch: int) -> int:
    """How many partial MAN sums `forward` writes for a client."""
    options = launch(stage, backward=False)
    return _chunks(stage, batch, options) * (stage.out // options["BO"])


def _constants(stage: Stage) -> dict[str, int]:
    oh, ow = stage.map
    return {"O": stage.out, "OH": oh, "OW": ow, "NORM": stage.groups > 0}


def forward(
    stage: Stage, z: Tensor, norm: tuple[Tensor, Tensor] | None, share: Tensor, man: Tensor,
    strides: tuple[int, int], options: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Pooled output [S, B, pixels·O], places of the maxima [S, B, windows, O], mean and 1/σ [S, B, groups, 2]."""
    clients, batch = share.shape
    options = options or launch(stage, backward=False)
    pooled = z.new_empty(clients, batch, stage.pooled * stage.out)
    arg = z.new_empty(clients, batch, stage.windows, stage.out, dtype=torch.int8)
    stats = share.new_empty(clients, batch, stage.groups, 2)
    gamma, beta = norm or (share, share)
    _forward[(_chunks(stage, batch, options), stage.out // options["BO"], clients)](
        z, gamma, beta, share, pooled, arg, stats, man, batch, gamma.stride(0), man.stride(0), *strides,
        **_constants(stage), EPS=stage.eps, **options,
    )  # fmt: skip
    return pooled, arg, stats


def backward(
    stage: Stage, z: Tensor, norm: tuple[Tensor, Tensor] | None, share: Tensor, grad: Tensor, arg: Tensor,
    stats: Tensor, dman: Tensor, strides: tuple[int, int], options: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dF/dz, and partial gradients [S, chunks, O] of the conv's bias and [S, chunks, 2, O] of (γ, β)."""
    clients, batch = share.shape
    options = options or launch(stage, backward=True)
    count = _chunks(stage, batch, options)
    dz = torch.empty_like(z)
    bpart = share.new_empty(clients, count, stage.out)
    npart = share.new_empty(clients, count if norm else 0, 2, stage.out)
    gamma, beta = norm or (share, share)
    _backward[(count, stage.out // options["BO"], clients)](
        z, gamma, beta, share, grad, arg, stats, dman, dz, bpart, npart, batch, gamma.stride(0), dman.stride(0),
        *strides, **_constants(stage), **options,
    )  # fmt: skip
    return dz, bpart, npart
