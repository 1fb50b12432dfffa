"""Stacked linear layers: forward with bias, ReLU and MAN; input gradient through the ReLU; weight gradient.

The time of these layers is that of reading S weight matrices: the kernels read them once, in fp32, from the flat
parameters, and round in registers. Weight gradients are written directly into the flat gradient.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedman.kernels.stage import Launch
from fedman.kernels.tiles import dot, relu


@triton.jit
def _forward(
    x, w, bias, share, out, man, B, P, man_stride,
    I: tl.constexpr, N: tl.constexpr, HIDDEN: tl.constexpr, ALIGN: tl.constexpr,  # noqa: E741
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    b = tl.program_id(1) * BM + tl.arange(0, BM)
    s = tl.program_id(2).to(tl.int64)
    row = tl.multiple_of(s * P, ALIGN)
    x += s * B * I
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, I, BK):
        i = start + tl.arange(0, BK)
        a = tl.load(x + b[:, None] * I + i[None, :], mask=(b < B)[:, None] & (i < I)[None, :], other=0.0)
        weight = tl.load(w + row + n[:, None] * I + i[None, :], mask=(n < N)[:, None] & (i < I)[None, :], other=0.0)
        acc = dot(a, tl.trans(weight), acc, PRECISION)
    acc += tl.load(bias + row + n, mask=n < N, other=0.0)[None, :]
    if HIDDEN:
        acc = relu(acc)
    tl.store(out + (s * B + b[:, None]) * N + n[None, :], acc, mask=(b < B)[:, None] & (n < N)[None, :])
    part = tl.load(share + s * B + b, mask=b < B, other=0.0)[:, None]
    value = tl.sum(tl.sum(tl.where((n < N)[None, :], part * acc * acc, 0.0), 1), 0) / N
    tl.store(man + s * man_stride + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), value)


@triton.jit
def _input_gradient(
    dz, w, x, share, dman, out, B, P, dman_stride,
    I: tl.constexpr, N: tl.constexpr, HIDDEN: tl.constexpr, ALIGN: tl.constexpr,  # noqa: E741
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    b = tl.program_id(1) * BM + tl.arange(0, BM)
    s = tl.program_id(2).to(tl.int64)
    row = tl.multiple_of(s * P, ALIGN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, N, BK):
        n = start + tl.arange(0, BK)
        g = tl.load(dz + (s * B + b[:, None]) * N + n[None, :], mask=(b < B)[:, None] & (n < N)[None, :], other=0.0)
        weight = tl.load(w + row + n[:, None] * I + i[None, :], mask=(n < N)[:, None] & (i < I)[None, :], other=0.0)
        acc = dot(g, weight, acc, PRECISION)
    at = (s * B + b[:, None]) * I + i[None, :]
    mask = (b < B)[:, None] & (i < I)[None, :]
    if HIDDEN:
        a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        coef = 2.0 / I * tl.load(dman + s * dman_stride) * tl.load(share + s * B + b, mask=b < B, other=0.0)
        acc = tl.where(a > 0, acc, 0.0) + coef[:, None] * a
    tl.store(out + at, acc, mask=mask)


@triton.jit
def _weight_gradient(
    dz, x, dw, db, B, P,
    I: tl.constexpr, N: tl.constexpr, ALIGN: tl.constexpr,  # noqa: E741
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    n = tl.program_id(1) * BM + tl.arange(0, BM)
    s = tl.program_id(2).to(tl.int64)
    row = tl.multiple_of(s * P, ALIGN)
    acc = tl.zeros((BM, BN), tl.float32)
    bias = tl.zeros((BK, BM), tl.float32)
    for start in range(0, B, BK):
        b = start + tl.arange(0, BK)
        g = tl.load(dz + (s * B + b[:, None]) * N + n[None, :], mask=(b < B)[:, None] & (n < N)[None, :], other=0.0)
        a = tl.load(x + (s * B + b[:, None]) * I + i[None, :], mask=(b < B)[:, None] & (i < I)[None, :], other=0.0)
        acc = dot(tl.trans(g), a, acc, PRECISION)
        bias += g.to(tl.float32)
    tl.store(dw + row + n[:, None] * I + i[None, :], acc, mask=(n < N)[:, None] & (i < I)[None, :])
    if tl.program_id(0) == 0:
        tl.store(db + row + n, tl.sum(bias, 0), mask=n < N)


FORWARD: Launch = {"BM": 64, "BN": 32, "BK": 64, "num_warps": 4, "num_stages": 4}
INPUT: Launch = {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 4}
WEIGHT: Launch = {"BM": 64, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 1}


def _constants(rows: Tensor, n: int, i: int) -> dict[str, int]:
    """Of a layer from i to n features.

    ALIGN tells the compiler the alignment of row starts (in floats), so that it can load vectors.
    """
    return {"I": i, "N": n, "ALIGN": math.gcd(rows.stride(0), 4)}


def _tiles(columns: int, rows: int, options: Launch) -> tuple[int, int]:
    return triton.cdiv(columns, options["BN"]), triton.cdiv(rows, options["BM"])


def blocks(batch: int, n: int) -> int:
    """How many partial MAN sums `forward` writes per client."""
    return math.prod(_tiles(n, batch, FORWARD))


def forward(x: Tensor, rows: Tensor, n: int, hidden: bool, share: Tensor, man: Tensor, precision: str) -> Tensor:
    """x [S, B, I] through the layer at the start of `rows` (weight [n, I], bias [n]), ReLU if `hidden`.

    The result has x's type if hidden; logits are fp32. Partial MAN sums go to `man`.
    """
    clients, batch, i = x.shape
    out = x.new_empty(clients, batch, n, dtype=x.dtype if hidden else torch.float32)
    _forward[(*_tiles(n, batch, FORWARD), clients)](
        x, rows, rows[:, n * i :], share, out, man, batch, rows.stride(0), man.stride(0),
        **_constants(rows, n, i), HIDDEN=hidden, PRECISION=precision, **FORWARD,
    )  # fmt: skip
    return out


def input_gradient(dz: Tensor, rows: Tensor, x: Tensor, dman: Tensor | None, share: Tensor, precision: str) -> Tensor:
    """dF/dx; with `dman` (x is then a hidden ReLU output a with that MAN gradient) dF/dz of the layer before.

    dz' = [a > 0]·dF/da + 2ζ·share/n·a.
    """
    clients, batch, n = dz.shape
    i = x.shape[-1]
    out = torch.empty_like(x)
    strength = share if dman is None else dman
    _input_gradient[(*_tiles(i, batch, INPUT), clients)](
        dz, rows, x, share, strength, out, batch, rows.stride(0), strength.stride(0),
        **_constants(rows, n, i), HIDDEN=dman is not None, PRECISION=precision, **INPUT,
    )  # fmt: skip
    return out


def weight_gradient(dz: Tensor, x: Tensor, rows: Tensor, precision: str) -> None:
    """Write dF/dweight and dF/dbias to `rows`, the layer's columns of the flat gradient."""
    clients, batch, n = dz.shape
    i = x.shape[-1]
    _weight_gradient[(*_tiles(i, n, WEIGHT), clients)](
        dz, x, rows, rows[:, n * i :], batch, rows.stride(0), **_constants(rows, n, i), PRECISION=precision, **WEIGHT
    )
