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
    group_sum,
    incoming,
    keep_max,
    moments,
    pooled_at,
    pooled_place,
    pooled_value,
    relu,
    window,
)


@triton.jit
def _at(n, q: tl.constexpr, end, c, OH: tl.constexpr, OW: tl.constexpr, O: tl.constexpr):  # noqa: E741
    """Offsets of position q of windows n in one client's map, and which exist: both [BM, O]."""
    b, row, column = window(n, (OH + 1) // 2, (OW + 1) // 2)
    ok = (n < end) & (row + q // 2 < OH) & (column + q % 2 < OW)
    at = ((b * OH + row + q // 2) * OW + column + q % 2)[:, None] * O + c[None, :]
    return at, tl.broadcast_to(ok[:, None], at.shape)


@triton.jit
def _forward(
    z, gamma, beta, share, pooled, arg, stats, man, B, P, man_stride, stride_px, stride_c,
    O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, G: tl.constexpr, EPS: tl.constexpr,  # noqa: E741
    CHUNK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    WINDOWS: tl.constexpr = ((OH + 1) // 2) * ((OW + 1) // 2)
    chunk, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    z += s * B * (OH * OW * O)
    pooled += s * B * ((OH // 2) * (OW // 2) * O)
    arg += s * B * (WINDOWS * O)
    c = tl.arange(0, O)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, B * WINDOWS)
    scale = tl.full((O,), 1.0, tl.float32)
    shift = tl.zeros((O,), tl.float32)
    if G > 0:
        total = tl.zeros((BM, O), tl.float32)
        squares = tl.zeros((BM, O), tl.float32)
        for start in range(0, CHUNK, BM):
            for q in tl.static_range(4):
                at, ok = _at(first + start + tl.arange(0, BM), q, end, c, OH, OW, O)
                v = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
                total += v
                squares += v * v
        mean, rstd = moments(tl.sum(total, 0), tl.sum(squares, 0), OH * OW * (O // G), EPS, G, O)
        stats += (s * B + chunk) * (2 * O)
        tl.store(stats + c, mean)
        tl.store(stats + O + c, rstd)
        scale = rstd * tl.load(gamma + s * P + c)
        shift = tl.load(beta + s * P + c) - mean * scale
    value = tl.zeros((BM, O), tl.float32)
    for start in range(0, CHUNK, BM):
        n = first + start + tl.arange(0, BM)
        best = tl.zeros((BM, O), tl.int32)
        squares = tl.zeros((BM, O), tl.float32)
        part = tl.load(share + s * B + n // WINDOWS, mask=n < end, other=0.0)[:, None]
        for q in tl.static_range(4):
            at, ok = _at(n, q, end, c, OH, OW, O)
            v = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
            a = tl.where(ok, relu(affine(v, scale, shift, G)), 0.0)
            squares += a * a
            best = keep_max(a, best, q)
        value += part * squares
        at, complete = pooled_at(n, c, stride_px, stride_c, OH, OW, O)
        tl.store(pooled + at, pooled_value(best), mask=((n < end) & complete)[:, None])
        tl.store(arg + n[:, None] * O + c[None, :], pooled_place(best), mask=(n < end)[:, None])
    tl.store(man + s * man_stride + chunk, tl.sum(tl.sum(value, 1), 0) / (OH * OW * O))


@triton.jit
def _backward(
    z, gamma, beta, share, grad, arg, stats, dman, dz, bpart, npart, B, P, dman_stride, stride_px, stride_c,
    O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, G: tl.constexpr,  # noqa: E741
    CHUNK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    WINDOWS: tl.constexpr = ((OH + 1) // 2) * ((OW + 1) // 2)
    chunk, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    z += s * B * (OH * OW * O)
    dz += s * B * (OH * OW * O)
    share += s * B
    grad += s * B * ((OH // 2) * (OW // 2) * O)
    arg += s * B * (WINDOWS * O)
    c = tl.arange(0, O)
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
            g, coef = incoming(grad, arg, share, strength, n, end, c, stride_px, stride_c, OH, OW, O)
            for q in tl.static_range(4):
                at, ok = _at(n, q, end, c, OH, OW, O)
                v = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
                dy = activation_gradient(affine(v, scale, shift, G), g, q, coef)
                dy = tl.where(ok, dy, 0.0)
                dbeta += dy
                dgamma += dy * (v - mean[None, :])
        dbeta_c = tl.sum(dbeta, 0)
        dgamma_c = tl.sum(dgamma, 0) * rstd
        tl.store(npart + out * (2 * O) + c, dgamma_c)
        tl.store(npart + out * (2 * O) + O + c, dbeta_c)
        entries: tl.constexpr = OH * OW * (O // G)
        slope = rstd * rstd * group_sum(dgamma_c * weighting, G, O) / entries
        constant = rstd * group_sum(dbeta_c * weighting, G, O) / entries - mean * slope
    bias = tl.zeros((BM, O), tl.float32)
    for start in range(0, CHUNK, BM):
        n = first + start + tl.arange(0, BM)
        g, coef = incoming(grad, arg, share, strength, n, end, c, stride_px, stride_c, OH, OW, O)
        for q in tl.static_range(4):
            at, ok = _at(n, q, end, c, OH, OW, O)
            v = tl.load(z + at, mask=ok, other=0.0).to(tl.float32)
            d = activation_gradient(affine(v, scale, shift, G), g, q, coef)
            if G > 0:
                d = d * scale[None, :] - constant[None, :] - v * slope[None, :]
            bias += tl.where(ok, d, 0.0)
            tl.store(dz + at, d, mask=ok)
    tl.store(bpart + out * O + c, tl.sum(bias, 0))


def launch(stage: Stage) -> Launch:
    """Tile sizes by shape: windows a tile, windows a program, warps."""
    return {"BM": 32, "CHUNK": stage.windows if stage.groups else 32, "num_warps": 4, "num_stages": 2}


def chunks(stage: Stage, batch: int, options: Launch) -> int:
    """Programs a client: how many partial results the kernels write."""
    return triton.cdiv(batch * stage.windows, options["CHUNK"])


def _constants(stage: Stage) -> dict[str, int]:
    oh, ow = stage.map
    return {"O": stage.out, "OH": oh, "OW": ow, "G": stage.groups}


def forward(
    stage: Stage, z: Tensor, norm: tuple[Tensor, Tensor] | None, share: Tensor, man: Tensor,
    strides: tuple[int, int], options: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Pooled output [S, B, pixels·O], places of the maxima [S, B, windows, O], statistics [S, B, 2, O]."""
    clients, batch = share.shape
    options = options or launch(stage)
    pooled = z.new_empty(clients, batch, stage.pooled * stage.out)
    arg = z.new_empty(clients, batch, stage.windows, stage.out, dtype=torch.int8)
    stats = share.new_empty(clients, batch if norm else 0, 2, stage.out)
    gamma, beta = norm or (share, share)
    _forward[(chunks(stage, batch, options), clients)](
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
    options = options or launch(stage)
    parts = chunks(stage, batch, options)
    dz = torch.empty_like(z)
    bpart = share.new_empty(clients, parts, stage.out)
    npart = share.new_empty(clients, parts if norm else 0, 2, stage.out)
    gamma, beta = norm or (share, share)
    _backward[(parts, clients)](
        z, gamma, beta, share, grad, arg, stats, dman, dz, bpart, npart, batch, gamma.stride(0), dman.stride(0),
        *strides, **_constants(stage), **options,
    )  # fmt: skip
    return dz, bpart, npart
