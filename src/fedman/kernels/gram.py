"""GroupNorm of the first stage without its map: statistics and gradients from sums over patches.

The map z = pᵀw is linear in the patch p under the kernel, so sums over a sample's map follow from sums over its
patches. With the Gram matrix A = Σ p·pᵀ, and e picking the ones among the inputs: Σ z² = wᵀAw and Σ z = wᵀAe. In
the backward pass, with U = Σ p·dy from `first_stage.backward`: Σ dy = eᵀU (that is dβ) and Σ dy·z = wᵀU, and where
dz = α·dy − β − γ·z, the weight gradient Σ p·dz is α·U − β·Ae − γ·Aw. So either pass computes the map once.

A patch belongs to a pair of outputs, left and right, each with its own weights (`first_stage`); sums run over both.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedman.kernels.first_stage import pair_weights, patches
from fedman.kernels.stage import Launch, Stage
from fedman.kernels.tiles import dot, group_sum, moments


@triton.jit
def _times(gram, weight, EXACT: tl.constexpr):
    """A·w, in nearly full fp32 or in TF32."""
    zero = tl.zeros(weight.shape, tl.float32)
    return tl.dot(gram, weight, zero, input_precision="tf32x3" if EXACT else "tf32")


@triton.jit
def _matrices(
    x, grams, B,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, KS: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    BM: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    WINDOWS: tl.constexpr = ((OH + 1) // 2) * (OW // 2)
    b, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k = tl.arange(0, KP)
    x += s * B * (H * W * C)
    gram = tl.zeros((KP, KP), tl.float32)
    for row in range(2 * ((WINDOWS + BM - 1) // BM)):
        n = b * WINDOWS + row // 2 * BM + tl.arange(0, BM)
        patch, _, _ = patches(x, n, row % 2, (b + 1) * WINDOWS, H, W, C, KS, OH, OW, KP)
        gram = dot(tl.trans(patch), patch, gram, PRECISION)
    tl.store(grams + (s * B + b) * (KP * KP) + k[:, None] * KP + k[None, :], gram)


@triton.jit
def _statistics(
    w, gamma, beta, grams, stats, B, P,
    C: tl.constexpr, O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, G: tl.constexpr,  # noqa: E741
    EPS: tl.constexpr, KP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """A sample by BO channels, whole groups of them."""
    b, block, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    k, c = tl.arange(0, KP), block * BO + tl.arange(0, BO)
    sample = s * B + b
    gram = tl.load(grams + sample * (KP * KP) + k[:, None] * KP + k[None, :])
    left = tl.trans(pair_weights(w, s, 0, c, O, KP)).to(tl.float32)
    right = tl.trans(pair_weights(w, s, 1, c, O, KP)).to(tl.float32)
    sums = tl.sum(tl.where((k == C - 1)[None, :], gram, 0.0), 1)
    total = tl.sum((left + right) * sums[:, None], 0)
    # exact in any precision: the variance is a difference
    squares = tl.sum(left * _times(gram, left, True), 0) + tl.sum(right * _times(gram, right, True), 0)
    mean, rstd = moments(total, squares, OH * OW * (O // G), EPS, BO * G // O, BO)
    scale = rstd * tl.load(gamma + s * P + c)
    stats += sample * (4 * O) + c
    tl.store(stats, mean)
    tl.store(stats + O, rstd)
    tl.store(stats + 2 * O, scale)
    tl.store(stats + 3 * O, tl.load(beta + s * P + c) - mean * scale)


@triton.jit
def _gradient(
    w, gamma, stats, grams, part, whole, npart, B, P,
    C: tl.constexpr, O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, G: tl.constexpr,  # noqa: E741
    KP: tl.constexpr, BO: tl.constexpr, SAMPLES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A few samples by BO channels, whole groups of them."""
    GROUPS: tl.constexpr = BO * G // O
    chunk, block, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    k, c = tl.arange(0, KP), block * BO + tl.arange(0, BO)
    left = tl.trans(pair_weights(w, s, 0, c, O, KP)).to(tl.float32)
    right = tl.trans(pair_weights(w, s, 1, c, O, KP)).to(tl.float32)
    weighting = tl.load(gamma + s * P + c) / (OH * OW * (O // G))
    at = c[None, :] * KP + k[:, None]
    to_left = tl.zeros((KP, BO), tl.float32)
    to_right = tl.zeros((KP, BO), tl.float32)
    to_gamma = tl.zeros((BO,), tl.float32)
    to_beta = tl.zeros((BO,), tl.float32)
    for b in range(chunk * SAMPLES, tl.minimum((chunk + 1) * SAMPLES, B)):
        sample = s * B + b
        of = stats + sample * (4 * O) + c
        mean, rstd, scale = tl.load(of), tl.load(of + O), tl.load(of + 2 * O)
        dleft = tl.load(part + sample * (2 * O * KP) + at)
        dright = tl.load(part + sample * (2 * O * KP) + O * KP + at)
        gram = tl.load(grams + sample * (KP * KP) + k[:, None] * KP + k[None, :])
        dbeta = tl.sum(tl.where((k == C - 1)[:, None], dleft + dright, 0.0), 0)
        dgamma = rstd * (tl.sum(left * dleft + right * dright, 0) - mean * dbeta)
        slope = rstd * rstd * group_sum(dgamma * weighting, GROUPS, BO)
        constant = rstd * group_sum(dbeta * weighting, GROUPS, BO) - mean * slope
        sums = tl.sum(tl.where((k == C - 1)[None, :], gram, 0.0), 1)
        shift = sums[:, None] * constant[None, :]
        to_left += dleft * scale[None, :] - shift - _times(gram, left, EXACT) * slope[None, :]
        to_right += dright * scale[None, :] - shift - _times(gram, right, EXACT) * slope[None, :]
        to_gamma += dgamma
        to_beta += dbeta
    out = s * tl.num_programs(0) + chunk
    tl.store(whole + out * (2 * O * KP) + at, to_left)
    tl.store(whole + out * (2 * O * KP) + O * KP + at, to_right)
    tl.store(npart + out * (2 * O) + c, to_gamma)
    tl.store(npart + out * (2 * O) + O + c, to_beta)


MATRICES: Launch = {"BM": 64, "num_warps": 4, "num_stages": 3}
STATISTICS: Launch = {"BO": 64, "num_warps": 4}
GRADIENT: Launch = {"BO": 32, "PROGRAMS": 800, "num_warps": 4, "num_stages": 2}


def _whole_groups(stage: Stage, channels: int) -> int:
    """Channels per program: about `channels`, but whole groups."""
    return min(stage.out, max(channels, stage.out // stage.groups))


def matrices(stage: Stage, x: Tensor, precision: str) -> Tensor:
    """The Gram matrices [S, B, KP, KP] of the images' patches, KP numbers each. They need no weights."""
    clients, batch = x.shape[:2]
    grams = x.new_empty(clients, batch, stage.depth, stage.depth, dtype=torch.float32)
    constants = stage.constants(_matrices) | MATRICES
    _matrices[(batch, clients)](x, grams, batch, KP=stage.depth, PRECISION=precision, **constants)
    return grams


def statistics(stage: Stage, w: Tensor, norm: tuple[Tensor, Tensor], grams: Tensor) -> Tensor:
    """Mean, 1/σ, scale and shift of each sample and channel [S, B, 4, O].

    The normalised map is z·scale + shift. `norm` are GroupNorm's scale and shift, rows of the flat parameters.
    """
    clients, batch = grams.shape[:2]
    options = STATISTICS | {"BO": _whole_groups(stage, STATISTICS["BO"])}
    stats = grams.new_empty(clients, batch, 4, stage.out)
    _statistics[(batch, stage.out // options["BO"], clients)](
        w, *norm, grams, stats, batch, norm[0].stride(0), **stage.constants(_statistics), KP=stage.depth, **options
    )
    return stats


def gradient(
    stage: Stage, w: Tensor, norm: tuple[Tensor, Tensor], stats: Tensor, grams: Tensor, part: Tensor, precision: str
) -> tuple[Tensor, Tensor]:
    """Partial gradients for the map [S, 2·chunks, O, KP], from those for the normalised map, and of γ and β
    [S, chunks, 2, O].

    Samples and channels are split over about `PROGRAMS` programs (800: six per multiprocessor of an H200).
    """
    clients, batch = stats.shape[:2]
    options = GRADIENT | {"BO": _whole_groups(stage, GRADIENT["BO"])}
    blocks = stage.out // options["BO"]
    samples = 1 << max(0, (clients * batch * blocks // options.pop("PROGRAMS")).bit_length() - 1)
    chunks = triton.cdiv(batch, samples)
    whole = part.new_empty(clients, 2 * chunks, stage.out, stage.depth)
    npart = stats.new_empty(clients, chunks, 2, stage.out)
    _gradient[(chunks, blocks, clients)](
        w, norm[0], stats, grams, part, whole, npart, batch, norm[0].stride(0), **stage.constants(_gradient),
        KP=stage.depth, SAMPLES=samples, EXACT=precision == "fp32", **options,
    )  # fmt: skip
    return whole, npart
