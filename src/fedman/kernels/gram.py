"""GroupNorm of the first stage without its map: statistics and gradients from sums over patches.

The map z = pᵀw is linear in the patch p under the kernel, so sums over a sample's map follow from sums over its
patches. With the Gram matrix A = Σ p·pᵀ, and e picking the ones among the inputs: Σ z² = wᵀAw and Σ z = wᵀAe. In
the backward pass, with U = Σ p·dy from `first.backward`: Σ dy = eᵀU (that is dβ) and Σ dy·z = wᵀU, and where
dz = α·dy − β − γ·z, the weight gradient Σ p·dz is α·U − β·Ae − γ·Aw. So either pass computes the map once.

A patch serves a pair of outputs, left and right, with weights of their own (`first`); sums run over both.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fedman.kernels.first import constants, pair_weights, patches
from fedman.kernels.stage import Launch, Stage
from fedman.kernels.tiles import dot


@triton.jit
def _group_sum(v, G: tl.constexpr, O: tl.constexpr):  # noqa: E741
    """Sums of the channel vector v over its G groups, repeated for each channel: [O] to [O]."""
    total = tl.sum(tl.reshape(v, (G, O // G)), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (G, O // G)), (O,))


@triton.jit
def _moments(total, squares, entries: tl.constexpr, EPS: tl.constexpr, G: tl.constexpr, O: tl.constexpr):  # noqa: E741
    """Mean and 1/σ of each channel's group from sums per channel; a group has `entries` values."""
    mean = _group_sum(total, G, O) / entries
    variance = _group_sum(squares, G, O) / entries - mean * mean
    return mean, 1.0 / tl.sqrt(tl.maximum(variance, 0.0) + EPS)


@triton.jit
def _times(gram, weight):
    """A·w in nearly full fp32: sums over a whole map cancel."""
    zero = tl.zeros(weight.shape, tl.float32)
    return tl.dot(gram, weight, zero, input_precision="tf32x3")


@triton.jit
def _statistics(
    x, w, gamma, beta, stats, grams, B, P,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr, KS: tl.constexpr,  # noqa: E741
    OH: tl.constexpr, OW: tl.constexpr, G: tl.constexpr, EPS: tl.constexpr,
    BM: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    WINDOWS: tl.constexpr = ((OH + 1) // 2) * (OW // 2)
    b, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, c = tl.arange(0, KP), tl.arange(0, O)
    x += s * B * (H * W * C)
    gram = tl.zeros((KP, KP), tl.float32)
    for row in range(2 * ((WINDOWS + BM - 1) // BM)):
        n = b * WINDOWS + row // 2 * BM + tl.arange(0, BM)
        patch, _, _ = patches(x, n, row % 2, (b + 1) * WINDOWS, H, W, C, KS, OH, OW, KP)
        gram = dot(tl.trans(patch), patch, gram, PRECISION)
    sample = s * B + b
    tl.store(grams + sample * (KP * KP) + k[:, None] * KP + k[None, :], gram)
    left = tl.trans(pair_weights(w, s, 0, c, O, KP)).to(tl.float32)
    right = tl.trans(pair_weights(w, s, 1, c, O, KP)).to(tl.float32)
    sums = tl.sum(tl.where((k == C - 1)[None, :], gram, 0.0), 1)
    total = tl.sum((left + right) * sums[:, None], 0)
    squares = tl.sum(left * _times(gram, left), 0) + tl.sum(right * _times(gram, right), 0)
    mean, rstd = _moments(total, squares, OH * OW * (O // G), EPS, G, O)
    scale = rstd * tl.load(gamma + s * P + c)
    stats += sample * (4 * O)
    tl.store(stats + c, mean)
    tl.store(stats + O + c, rstd)
    tl.store(stats + 2 * O + c, scale)
    tl.store(stats + 3 * O + c, tl.load(beta + s * P + c) - mean * scale)


@triton.jit
def _gradient(
    w, gamma, stats, grams, part, npart, B, P,
    C: tl.constexpr, O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, G: tl.constexpr,  # noqa: E741
    KP: tl.constexpr,
):  # fmt: skip
    b, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, c = tl.arange(0, KP), tl.arange(0, O)
    sample = s * B + b
    stats += sample * (4 * O)
    mean, rstd, scale = tl.load(stats + c), tl.load(stats + O + c), tl.load(stats + 2 * O + c)
    left = tl.trans(pair_weights(w, s, 0, c, O, KP)).to(tl.float32)
    right = tl.trans(pair_weights(w, s, 1, c, O, KP)).to(tl.float32)
    at = part + sample * (2 * O * KP) + c[None, :] * KP + k[:, None]
    dleft, dright = tl.load(at), tl.load(at + O * KP)
    dbeta = tl.sum(tl.where((k == C - 1)[:, None], dleft + dright, 0.0), 0)
    dgamma = rstd * (tl.sum(left * dleft + right * dright, 0) - mean * dbeta)
    tl.store(npart + sample * (2 * O) + c, dgamma)
    tl.store(npart + sample * (2 * O) + O + c, dbeta)
    weighting = tl.load(gamma + s * P + c) / (OH * OW * (O // G))
    slope = rstd * rstd * _group_sum(dgamma * weighting, G, O)
    constant = rstd * _group_sum(dbeta * weighting, G, O) - mean * slope
    gram = tl.load(grams + sample * (KP * KP) + k[:, None] * KP + k[None, :])
    sums = tl.sum(tl.where((k == C - 1)[None, :], gram, 0.0), 1)
    shift = sums[:, None] * constant[None, :]
    tl.store(at, dleft * scale[None, :] - shift - _times(gram, left) * slope[None, :])
    tl.store(at + O * KP, dright * scale[None, :] - shift - _times(gram, right) * slope[None, :])


STATISTICS: Launch = {"BM": 128, "num_warps": 4, "num_stages": 3}
GRADIENT: Launch = {"num_warps": 4}


def statistics(
    stage: Stage, x: Tensor, w: Tensor, norm: tuple[Tensor, Tensor], precision: str, options: Launch = STATISTICS
) -> tuple[Tensor, Tensor]:
    """Mean, 1/σ, scale and shift of each sample and channel [S, B, 4, O], and Gram matrices [S, B, KP, KP].

    The normalised map is z·scale + shift. `norm` are GroupNorm's scale and shift, rows of the flat parameters.
    """
    clients, batch, depth = *x.shape[:2], w.shape[-1]
    gamma, beta = norm
    stats = gamma.new_empty(clients, batch, 4, stage.out)
    grams = gamma.new_empty(clients, batch, depth, depth)
    _statistics[(batch, clients)](
        x, w, gamma, beta, stats, grams, batch, gamma.stride(0), **constants(stage),
        G=stage.groups, EPS=stage.eps, KP=depth, PRECISION=precision, **options,
    )  # fmt: skip
    return stats, grams


def gradient(
    stage: Stage, w: Tensor, norm: tuple[Tensor, Tensor], stats: Tensor, grams: Tensor, part: Tensor
) -> Tensor:
    """Partial gradients [S, B, 2, O] of γ and β; turns `part`, made for the normalised map, into that for the map."""
    clients, batch = stats.shape[:2]
    npart = stats.new_empty(clients, batch, 2, stage.out)
    oh, ow = stage.map
    _gradient[(batch, clients)](
        w, norm[0], stats, grams, part, npart, batch, norm[0].stride(0), C=stage.channels, O=stage.out, OH=oh, OW=ow,
        G=stage.groups, KP=w.shape[-1], **GRADIENT,
    )  # fmt: skip
    return npart
