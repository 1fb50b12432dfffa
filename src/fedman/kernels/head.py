"""The outputs of the stacked model: cross-entropy of the logits, and MAN terms summed from their partial sums."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _forward(
    logits, y, share, partial, ce, man, B, T,
    K: tl.constexpr, PARTS: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    total = tl.zeros((BM,), tl.float32)
    for start in range(0, B, BM):
        b = start + tl.arange(0, BM)
        z = tl.load(
            logits + (s * B + b[:, None]) * K + k[None, :],
            mask=(b < B)[:, None] & (k < K)[None, :], other=-float("inf"),
        )  # fmt: skip
        z = tl.where((b < B)[:, None], z, 0.0)
        top = tl.max(z, 1)
        label = tl.load(y + s * B + b, mask=b < B, other=0)
        target = tl.sum(tl.where(k[None, :] == label[:, None], z, 0.0), 1)
        loss = tl.log(tl.sum(tl.exp(z - top[:, None]), 1)) + top - target
        total += loss * tl.load(share + s * B + b, mask=b < B, other=0.0)
    tl.store(ce + s, tl.sum(total, 0))
    t = tl.arange(0, BT)
    for layer in tl.static_range(L):
        value = tl.load(partial + (s * L + layer) * T + t, mask=t < PARTS[layer], other=0.0)
        tl.store(man + s * L + layer, tl.sum(value, 0))


def forward(logits: Tensor, y: Tensor, share: Tensor, partial: Tensor, parts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Cross-entropy [S] = Σ_b share·(−log softmax(logits)[y]), and MAN terms [S, L].

    Row (s, l) of `partial` [S, L, T] holds `parts[l]` partial sums; the rest is uninitialised.
    """
    clients, batch, classes = logits.shape
    _, layers, width = partial.shape
    ce, man = share.new_empty(clients), share.new_empty(clients, layers)
    _forward[(clients,)](
        logits, y, share, partial, ce, man, batch, width, K=classes, PARTS=parts, L=layers,
        BM=64, BK=triton.next_power_of_2(classes), BT=triton.next_power_of_2(width), num_warps=16,
    )  # fmt: skip
    return ce, man


@triton.jit
def _backward(
    logits, y, share, dce, dman, out, B, dce_stride, dman_stride, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    s = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    mask = (b < B)[:, None] & (k < K)[None, :]
    at = (s * B + b[:, None]) * K + k[None, :]
    z = tl.load(logits + at, mask=mask, other=-float("inf"))
    z = tl.where((b < B)[:, None], z, 0.0)
    e = tl.exp(z - tl.max(z, 1)[:, None])
    label = tl.load(y + s * B + b, mask=b < B, other=0)
    part = tl.load(share + s * B + b, mask=b < B, other=0.0)[:, None]
    d = e / tl.sum(e, 1)[:, None] - tl.where(k[None, :] == label[:, None], 1.0, 0.0)
    d = part * (tl.load(dce + s * dce_stride) * d + 2.0 / K * tl.load(dman + s * dman_stride) * tl.where(k < K, z, 0.0))
    tl.store(out + at, d, mask=mask)


def backward(logits: Tensor, y: Tensor, share: Tensor, dce: Tensor, dman: Tensor, dtype: torch.dtype) -> Tensor:
    """dF/dlogits = share·(dce·(softmax − onehot) + 2·dman/K·logits), dce and dman [S]."""
    clients, batch, classes = logits.shape
    out = torch.empty_like(logits, dtype=dtype)
    grid = (triton.cdiv(batch, 16), clients)
    _backward[grid](
        logits, y, share, dce, dman, out, batch, dce.stride(0), dman.stride(0),
        K=classes, BM=16, BK=triton.next_power_of_2(classes),
    )  # fmt: skip
    return out
