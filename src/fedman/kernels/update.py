"""Descent and ascent steps of S clients' flat parameters, each in two passes over memory.

`clip_update`: w ← w − η·(g·min(1, C/(‖g‖ + 1e-6)) + λ·w). `climb`: w + ρ·T²s/(‖Ts‖ + ε). Norms are taken over each row.
The first pass writes partial sums of squares; the second adds them in a fixed order, so results are the same to the bit
on every run.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedman.kernels.stage import Launch

OPTIONS: Launch = {"BLOCK": 8192, "num_warps": 8}


@triton.jit
def _of_row(value, s, stride, ROWS: tl.constexpr):
    """The value of row s, or the one for all rows."""
    if ROWS:
        return tl.load(value + s * stride)
    else:
        return value


@triton.jit
def _norm(part, s, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """The norm of row s from its partial sums of squares."""
    p = tl.arange(0, ROWS)
    return tl.sqrt(tl.sum(tl.load(part + s * PARTS + p, mask=p < PARTS, other=0.0), 0))


@triton.jit
def _update(
    w, g, out, part, lr, extra, clip, decay, lr_stride, extra_stride, EXTRAS: tl.constexpr,
    P: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(1).to(tl.int64)
    factor = clip / (_norm(part, s, PARTS, ROWS) + 1e-6)
    factor = tl.where(factor > 1.0, 1.0, factor)
    eta = tl.load(lr + s * lr_stride)
    decay += _of_row(extra, s, extra_stride, EXTRAS)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.multiple_of(s * P, ALIGN) + i
    v = tl.load(w + at, mask=i < P)
    d = tl.load(g + at, mask=i < P)
    tl.store(out + at, v - (eta * factor) * d - (eta * decay) * v, mask=i < P)


@triton.jit
def _scale(v, is_weight, i, eta, P: tl.constexpr, ADAPT: tl.constexpr):
    """T: |w| + η for weights and 1 for biases; 1 for both if not ADAPT."""
    if ADAPT:
        return tl.where(tl.load(is_weight + i, mask=i < P, other=0) != 0, tl.abs(v) + eta, 1.0)
    else:
        return tl.full(v.shape, 1.0, tl.float32)


@triton.jit
def _squares(
    w, g, is_weight, part, eta, eta_stride, ADAPT: tl.constexpr, ETAS: tl.constexpr,
    P: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block's part of ‖T·g‖²; T is 1 if not ADAPT, and only g and `part` are used."""
    s = tl.program_id(1).to(tl.int64)
    eta = _of_row(eta, s, eta_stride, ETAS)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.multiple_of(s * P, ALIGN) + i
    d = tl.load(g + at, mask=i < P, other=0.0)
    if ADAPT:
        d *= _scale(tl.load(w + at, mask=i < P, other=0.0), is_weight, i, eta, P, ADAPT)
    tl.store(part + s * tl.num_programs(0) + tl.program_id(0), tl.sum(d * d, 0))


@triton.jit
def _climb(
    w, g, is_weight, out, part, rho, eps, eta, rho_stride, eta_stride, ADAPT: tl.constexpr, RHOS: tl.constexpr,
    ETAS: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(1).to(tl.int64)
    rho = _of_row(rho, s, rho_stride, RHOS)
    eta = _of_row(eta, s, eta_stride, ETAS)
    norm = _norm(part, s, PARTS, ROWS)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.multiple_of(s * P, ALIGN) + i
    v = tl.load(w + at, mask=i < P)
    scale = _scale(v, is_weight, i, eta, P, ADAPT)
    tl.store(out + at, v + scale * scale * tl.load(g + at, mask=i < P) * (rho / (norm + eps)), mask=i < P)


def clip_update(w: Tensor, g: Tensor, lr: Tensor, clip: float, decay: float, extra: Tensor | float) -> Tensor:
    """`w − lr·(g·min(1, clip/(‖g‖ + 1e-6)) + (decay + extra)·w)` for rows of fp32 `w` and `g` [S, P].

    `lr` is a tensor on the device, with one value or one per row; `extra` is such a tensor or a number.
    """
    w, g = w.contiguous(), g.contiguous()
    part, sums, constants = _launch(w)
    out = torch.empty_like(w)
    _squares[part.shape[::-1]](w, g, g, part, 0.0, 0, ADAPT=False, ETAS=False, **constants)
    _update[part.shape[::-1]](
        w, g, out, part, lr, extra, clip, decay, _stride(lr), _stride(extra),
        EXTRAS=isinstance(extra, Tensor), **sums, **constants,
    )  # fmt: skip
    return out


def climb(
    w: Tensor, s: Tensor, rho: Tensor | float, eps: float, eta: Tensor | float | None, is_weight: Tensor
) -> Tensor:
    """`w + ρ·T²s/(‖Ts‖ + ε)` for rows of fp32 `w` and `s` [S, P]; T is |w| + η where `is_weight` [P], else 1.

    With `eta` None T is 1. `rho` and `eta` are numbers, or tensors on the device with one value per row.
    """
    w, s = w.contiguous(), s.contiguous()
    part, sums, constants = _launch(w)
    constants |= {"ADAPT": eta is not None, "ETAS": isinstance(eta, Tensor)}
    weights, out, eta = is_weight.view(torch.uint8), torch.empty_like(w), 0.0 if eta is None else eta
    _squares[part.shape[::-1]](w, s, weights, part, eta, _stride(eta), **constants)
    _climb[part.shape[::-1]](
        w, s, weights, out, part, rho, eps, eta, _stride(rho), _stride(eta),
        RHOS=isinstance(rho, Tensor), **sums, **constants,
    )  # fmt: skip
    return out


def _launch(w: Tensor) -> tuple[Tensor, Launch, Launch]:
    """Partial sums [S, parts] of the rows, to be written; the constants of those who read them, and of all."""
    clients, size = w.shape
    parts = triton.cdiv(size, OPTIONS["BLOCK"])
    sums = {"PARTS": parts, "ROWS": triton.next_power_of_2(parts)}
    return w.new_empty(clients, parts), sums, {"P": size, "ALIGN": math.gcd(size, 4), **OPTIONS}


def _stride(v: Tensor | float) -> int:
    """The stride of one value per row; 0 for a value shared by all rows."""
    return v.stride(0) if isinstance(v, Tensor) and v.numel() > 1 else 0
