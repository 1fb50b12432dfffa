"""Measuring an activation on a GPU: sums of squares by row, and their gradient together with that of ReLU.

Tensors are treated as rows of n entries in memory order, whatever the layout inside a row.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _squares(a, s, n, total, BLOCK: tl.constexpr):
    SUM: tl.constexpr = s.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    entries = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), SUM)
    for start in range(0, n, BLOCK):
        v = tl.load(a + row * n + start + entries, mask=start + entries < n, other=0.0).to(SUM)
        acc += v * v
    tl.store(s + row, tl.sum(acc, 0) / total)


@triton.jit
def _gradient(grad_a, a, grad_s, out, n, stride_s, total, RELU: tl.constexpr, BLOCK: tl.constexpr):
    SUM: tl.constexpr = grad_s.dtype.element_ty
    row = tl.program_id(1).to(tl.int64)
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < n
    at = row * n + entries
    v = tl.load(a + at, mask=inside).to(SUM)
    g = v * (2 * tl.load(grad_s + row * stride_s) / total)
    if grad_a is not None:
        above = tl.load(grad_a + at, mask=inside).to(SUM)
        g += tl.where(v <= 0, 0.0, above) if RELU else above
    tl.store(out + at, g, mask=inside)


def squares(a: Tensor, keep: int, total: int) -> Tensor:
    """s = Σ a²/total over all dimensions but the first `keep`."""
    s = torch.empty(a.shape[:keep], device=a.device, dtype=torch.promote_types(a.dtype, torch.float32))
    rows, n = s.numel(), a.numel() // s.numel()
    block = min(triton.next_power_of_2(n), 4096)
    _squares[(rows,)](a, s, n, total, BLOCK=block, num_warps=max(1, block // 256))
    return s


def gradient(grad_a: Tensor | None, a: Tensor, grad_s: Tensor, total: int, relu: bool) -> Tensor:
    """[a > 0]·grad_a + (2/total)·grad_s·a; without the bracket if not `relu`. `grad_a` has the layout of `a`."""
    grad_s = grad_s.reshape(-1)
    out = torch.empty_like(a)
    rows, n = grad_s.numel(), a.numel() // grad_s.numel()
    block = min(triton.next_power_of_2(n), 512)
    _gradient[(triton.cdiv(n, block), rows)](grad_a, a, grad_s, out, n, grad_s.stride(0), total, relu, BLOCK=block)
    return out
