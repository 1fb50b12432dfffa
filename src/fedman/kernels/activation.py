"""[GroupNorm,] ReLU, MAN and 2×2 max-pool of a stored map, forward and backward, one pass each.

The forward pass reads the map z once (twice with GroupNorm, from the cache: one program handles a sample) and stores
the pooled values and the place of each maximum. The backward pass writes dF/dz: MAN makes it dense,
dy = [y is the maximum]·g + 2ζ·share/n·relu(y), and GroupNorm, y = γ·(z − mean)/σ + β, couples the entries of a group:
dz = γ/σ·dy − (Σ γ·dy + (z − mean)/σ·Σ dy·(y − β))/(n·σ), with sums over the group's n entries. These need no pass over
the map: g is nonzero at the pooled values only, and MAN's part is its factor times Σ γ·relu(y) and Σ relu(y)·(y − β),
which the forward pass stores.
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
    group_sum,
    incoming,
    marked,
    moments,
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
    ok = n < end
    if OH % 2 == 1:
        ok = ok & (row + q // 2 < OH)
    if OW % 2 == 1:
        ok = ok & (column + q % 2 < OW)
    at = ((b * OH + row + q // 2) * OW + column + q % 2)[:, None] * O + c[None, :]
    return at, tl.broadcast_to(ok[:, None], at.shape)


@triton.jit
def _load(z, n, q: tl.constexpr, end, c, OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr):  # noqa: E741
    at, ok = _at(n, q, end, c, OH, OW, O)
    return tl.load(z + at, mask=ok, other=0.0)


@triton.jit
def _positions(z, n, end, c, OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr):  # noqa: E741
    """The four positions of windows n, as stored.

    Loaded together: the compiler moves no load across a store, so separate loads would wait for each other.
    """
    left = _load(z, n, 0, end, c, OH, OW, O)
    right = _load(z, n, 1, end, c, OH, OW, O)
    return left, right, _load(z, n, 2, end, c, OH, OW, O), _load(z, n, 3, end, c, OH, OW, O)


@triton.jit
def _forward(
    z, gamma, beta, share, pooled, arg, stats, man, B, P, man_stride, stride_px, stride_c,
    O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, G: tl.constexpr, EPS: tl.constexpr,  # noqa: E741
    CHUNK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One chunk of windows; with GroupNorm, a sample."""
    WINDOWS: tl.constexpr = ((OH + 1) // 2) * ((OW + 1) // 2)
    NORM: tl.constexpr = G > 0
    AHEAD: tl.constexpr = 3 if NORM else 1  # tiles in flight; without GroupNorm there is one
    chunk, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    z += s * B * (OH * OW * O)
    pooled += s * B * ((OH // 2) * (OW // 2) * O)
    arg += s * B * (WINDOWS * O)
    c = tl.arange(0, O)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, B * WINDOWS)
    scale = tl.full((O,), 1.0, tl.float32)
    shift = tl.zeros((O,), tl.float32)
    if NORM:
        sums = tl.zeros((BM, O), tl.float32)
        sums_squares = tl.zeros((BM, O), tl.float32)
        for start in tl.range(0, CHUNK, BM, num_stages=AHEAD):
            tiles = _positions(z, first + start + tl.arange(0, BM), end, c, OH, OW, O)
            for q in tl.static_range(4):
                v = tiles[q].to(tl.float32)
                sums += v
                sums_squares += v * v
        total = tl.sum(sums, 0)
        mean, rstd = moments(total, tl.sum(sums_squares, 0), OH * OW * (O // G), EPS, G, O)
        weight, bias = tl.load(gamma + s * P + c), tl.load(beta + s * P + c)
        scale = rstd * weight
        shift = bias - mean * scale
    squares = tl.zeros((BM, O), tl.float32)
    active = tl.zeros((BM, O), tl.float32)
    for start in tl.range(0, CHUNK, BM, num_stages=AHEAD):
        n = first + start + tl.arange(0, BM)
        best = tl.zeros((BM, O), tl.int32)
        here = tl.zeros((BM, O), tl.float32)
        tiles = _positions(z, n, end, c, OH, OW, O)
        for q in tl.static_range(4):
            a = relu(affine(tiles[q].to(tl.float32), scale[None, :], shift[None, :], NORM))
            if NORM and (OH % 2 == 1 or OW % 2 == 1 or CHUNK % BM > 0):  # positions outside the map are no longer zero
                _, ok = _at(n, q, end, c, OH, OW, O)
                a = tl.where(ok, a, 0.0)
            best = tl.maximum(best, marked(a, 3 - q))
            if NORM:  # the chunk is one sample
                squares += a * a
                active += a
            else:
                here += a * a
        if not NORM:
            squares += here * tl.load(share + s * B + n // WINDOWS, mask=n < end, other=0.0)[:, None]
        at, complete = pooled_at(n, c, stride_px, stride_c, OH, OW, O)
        tl.store(pooled + at, pooled_value(best), mask=((n < end) & complete)[:, None])
        tl.store(arg + n[:, None] * O + c[None, :], pooled_place(best), mask=(n < end)[:, None])
    by_channel = tl.sum(squares, 0)
    value = tl.sum(by_channel, 0) / (OH * OW * O)
    if NORM:
        value *= tl.load(share + s * B + chunk)
        relus = tl.sum(active, 0)
        stats += (s * B + chunk) * (5 * O) + c
        tl.store(stats, mean)
        tl.store(stats + O, rstd)
        tl.store(stats + 2 * O, total)
        tl.store(stats + 3 * O, group_sum(weight * relus, G, O))
        tl.store(stats + 4 * O, group_sum(by_channel - bias * relus, G, O))
    tl.store(man + s * man_stride + chunk, value)


@triton.jit
def _backward(
    z, gamma, beta, share, pooled, grad, arg, stats, dman, dz, bpart, npart, B, P, dman_stride, stride_px, stride_c,
    O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, G: tl.constexpr,  # noqa: E741
    CHUNK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dz of one chunk and its part of the bias gradient; with GroupNorm, a chunk is a sample, and also dγ and dβ."""
    WINDOWS: tl.constexpr = ((OH + 1) // 2) * ((OW + 1) // 2)
    NORM: tl.constexpr = G > 0
    AHEAD: tl.constexpr = 3 if NORM else 1  # tiles in flight; without GroupNorm there is one
    chunk, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    z += s * B * (OH * OW * O)
    dz += s * B * (OH * OW * O)
    share += s * B
    pooled += s * B * ((OH // 2) * (OW // 2) * O)
    grad += s * B * ((OH // 2) * (OW // 2) * O)
    arg += s * B * (WINDOWS * O)
    c = tl.arange(0, O)
    strength = 2.0 * tl.load(dman + s * dman_stride)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, B * WINDOWS)
    out = s * tl.num_programs(0) + chunk
    scale = tl.full((O,), 1.0, tl.float32)
    shift = tl.zeros((O,), tl.float32)
    if NORM:
        stats += (s * B + chunk) * (5 * O) + c
        mean, rstd = tl.load(stats), tl.load(stats + O)
        weight, bias = tl.load(gamma + s * P + c), tl.load(beta + s * P + c)
        scale = rstd * weight
        shift = bias - mean * scale
        sums = tl.zeros((BM, O), tl.float32)
        sums_y = tl.zeros((BM, O), tl.float32)
        for start in tl.range(0, CHUNK, BM, num_stages=AHEAD):
            n = first + start + tl.arange(0, BM)
            at, complete = pooled_at(n, c, stride_px, stride_c, OH, OW, O)
            mask = ((n < end) & complete)[:, None]
            y = tl.load(pooled + at, mask=mask, other=0.0).to(tl.float32)
            g = tl.where(y > 0, tl.load(grad + at, mask=mask, other=0.0).to(tl.float32), 0.0)
            sums += g
            sums_y += g * y
        by_channel = tl.sum(sums, 0)
        man = strength / (OH * OW * O) * tl.load(share + chunk)
        total = group_sum(weight * by_channel, G, O) + man * tl.load(stats + 3 * O)
        total_y = group_sum(tl.sum(sums_y, 0) - bias * by_channel, G, O) + man * tl.load(stats + 4 * O)
        slope = rstd * rstd * total_y / (OH * OW * (O // G))
        constant = rstd * total / (OH * OW * (O // G)) - mean * slope
        dbias_rest = (OH * OW) * constant + slope * tl.load(stats + 2 * O)
    dy = tl.zeros((BM, O), tl.float32)
    dyz = tl.zeros((BM, O), tl.float32)
    for start in tl.range(0, CHUNK, BM, num_stages=AHEAD):
        n = first + start + tl.arange(0, BM)
        g, coef = incoming(grad, arg, share, strength, n, end, c, stride_px, stride_c, OH, OW, O)
        tiles = _positions(z, n, end, c, OH, OW, O)
        places = quarters(g)
        for q in tl.static_range(4):
            at, ok = _at(n, q, end, c, OH, OW, O)
            v = tiles[q].to(tl.float32)
            y = affine(v, scale[None, :], shift[None, :], NORM)
            d = activation_gradient(y, places[q], coef[:, None])
            if OH % 2 == 1 or OW % 2 == 1:
                d = tl.where(ok, d, 0.0)
            dy += d
            if NORM:
                dyz += d * v
                d = d * scale[None, :] - constant[None, :] - v * slope[None, :]
            tl.store(dz + at, d, mask=ok)
    dbias = tl.sum(dy, 0)
    if NORM:
        npart += out * (2 * O) + c
        tl.store(npart, rstd * (tl.sum(dyz, 0) - mean * dbias))
        tl.store(npart + O, dbias)
        dbias = rstd * weight * dbias - dbias_rest
    tl.store(bpart + out * O + c, dbias)


def launch(stage: Stage, backward: bool) -> Launch:
    """Windows per tile and per program, warps."""
    if stage.groups:
        tile = min(1024 // stage.out, triton.next_power_of_2(stage.windows))
        return {"BM": tile, "CHUNK": stage.windows, "num_warps": 4}
    tile = 8 if backward else 32
    return {"BM": tile, "CHUNK": tile, "num_warps": 2 if backward else 4}


def parts(stage: Stage, batch: int) -> int:
    """How many partial MAN sums `forward` writes per client."""
    return stage.chunks(batch, launch(stage, backward=False))


def forward(
    stage: Stage, z: Tensor, norm: tuple[Tensor, Tensor] | None, share: Tensor, man: Tensor,
    strides: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Pooled output [S, B, pixels·O] and places of the maxima [S, B, windows, O].

    With GroupNorm [S, B, 5, O] too, by sample and channel: mean, 1/σ, Σ z, its group's Σ γ·relu(y), Σ relu(y)·(y − β).
    """
    clients, batch = share.shape
    options = launch(stage, backward=False)
    pooled = z.new_empty(clients, batch, stage.pooled * stage.out)
    arg = z.new_empty(clients, batch, stage.windows, stage.out, dtype=torch.int8)
    stats = share.new_empty(clients, batch, 5 if norm else 0, stage.out)
    gamma, beta = norm or (share, share)
    _forward[(stage.chunks(batch, options), clients)](
        z, gamma, beta, share, pooled, arg, stats, man, batch, gamma.stride(0), man.stride(0), *strides,
        **stage.constants(_forward), **options,
    )  # fmt: skip
    return pooled, arg, stats


def backward(
    stage: Stage, z: Tensor, norm: tuple[Tensor, Tensor] | None, share: Tensor, pooled: Tensor, grad: Tensor,
    arg: Tensor, stats: Tensor, dman: Tensor, strides: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dF/dz, and partial gradients [S, chunks, O] of the conv's bias and [S, chunks, 2, O] of (γ, β)."""
    clients, batch = share.shape
    options = launch(stage, backward=True)
    count = stage.chunks(batch, options)
    dz = torch.empty_like(z)
    bpart = share.new_empty(clients, count, stage.out)
    npart = share.new_empty(clients, count if norm else 0, 2, stage.out)
    gamma, beta = norm or (share, share)
    _backward[(count, clients)](
        z, gamma, beta, share, pooled, grad, arg, stats, dman, dz, bpart, npart, batch, gamma.stride(0), dman.stride(0),
        *strides, **stage.constants(_backward), **options,
    )  # fmt: skip
    return dz, bpart, npart
