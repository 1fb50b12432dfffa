"""The cell of an LSTM for S stacked models: one launch a step forward, one back.

    i, f, g, o = x + h        gates [.., 4H]: x of the inputs and biases, h of the state before
    c' = σ(f)·c + σ(i)·tanh g,    h' = σ(o)·tanh c'

Between the launches there is one batched product with the recurrent weights. Their gradient is left to one product
over all steps at the end, where autograd would add up one a step. The cell's state is float32 in any precision.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 256


@triton.jit
def _cell(
    x, h, c, c_next, h_next, gates, x_model, x_row, out_model, gates_model, B: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of every model: x [S, B, 4H] and h, from c to c_next [S, B, H]; keeps the gates after σ and tanh."""
    s, b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m = j < H
    at = x + s * x_model + b * x_row + j
    i = tl.load(at, mask=m).to(tl.float32)
    f = tl.load(at + H, mask=m).to(tl.float32)
    g = tl.load(at + 2 * H, mask=m).to(tl.float32)
    o = tl.load(at + 3 * H, mask=m).to(tl.float32)
    at = h + (s * B + b) * 4 * H + j
    i += tl.load(at, mask=m).to(tl.float32)
    f += tl.load(at + H, mask=m).to(tl.float32)
    g += tl.load(at + 2 * H, mask=m).to(tl.float32)
    o += tl.load(at + 3 * H, mask=m).to(tl.float32)
    i, f, g, o = tl.sigmoid(i), tl.sigmoid(f), libdevice.tanh(g), tl.sigmoid(o)
    state = (s * B + b) * H + j
    new = f * tl.load(c + state, mask=m) + i * g
    tl.store(c_next + state, new, mask=m)
    tl.store(h_next + s * out_model + b * H + j, (o * libdevice.tanh(new)).to(h_next.dtype.element_ty), mask=m)
    at = gates + s * gates_model + b * 4 * H + j
    kind = gates.dtype.element_ty
    tl.store(at, i.to(kind), mask=m)
    tl.store(at + H, f.to(kind), mask=m)
    tl.store(at + 2 * H, g.to(kind), mask=m)
    tl.store(at + 3 * H, o.to(kind), mask=m)


@triton.jit
def _cell_back(
    gates, c, c_next, grad_out, grad_h, grad_c, grad_gates, gates_model, out_model, out_row, B: tl.constexpr,
    H: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Back through a step: from the gradient of its output, and of the next step's state, to that of its gates."""
    s, b = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m = j < H
    at = gates + s * gates_model + b * 4 * H + j
    i = tl.load(at, mask=m).to(tl.float32)
    f = tl.load(at + H, mask=m).to(tl.float32)
    g = tl.load(at + 2 * H, mask=m).to(tl.float32)
    o = tl.load(at + 3 * H, mask=m).to(tl.float32)
    state = (s * B + b) * H + j
    dh = tl.load(grad_out + s * out_model + b * out_row + j, mask=m).to(tl.float32)
    if not LAST:
        dh += tl.load(grad_h + state, mask=m).to(tl.float32)
    th = libdevice.tanh(tl.load(c_next + state, mask=m))
    dc = tl.load(grad_c + state, mask=m) + dh * o * (1 - th * th)
    tl.store(grad_c + state, dc * f, mask=m)
    kind = grad_gates.dtype.element_ty
    at = grad_gates + s * gates_model + b * 4 * H + j
    tl.store(at, (dc * g * i * (1 - i)).to(kind), mask=m)
    tl.store(at + H, (dc * tl.load(c + state, mask=m) * f * (1 - f)).to(kind), mask=m)
    tl.store(at + 2 * H, (dc * i * (1 - g * g)).to(kind), mask=m)
    tl.store(at + 3 * H, (dh * th * o * (1 - o)).to(kind), mask=m)


class StackedLSTM(torch.autograd.Function):
    """(x [S, T, B, 4H], w [S, 4H, H], h0 [S, B, H], c0 [S, B, H]) ↦ (h of every step [S, T, B, H], the last c)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor]:
        S, T, B, H = *x.shape[:3], w.shape[2]
        w = w.to(x.dtype).contiguous()
        gates, out = x.new_empty(S, T, B, 4 * H), x.new_empty(S, T, B, H)
        c = torch.empty(T + 1, S, B, H, device=x.device)
        c[0].copy_(c0)
        x = x if x.stride(3) == 1 else x.contiguous()
        h, turned = h0.to(x.dtype), w.transpose(1, 2)
        for t in range(T):
            _cell[(S, B, triton.cdiv(H, BLOCK))](
                x[:, t], torch.bmm(h, turned), c[t], c[t + 1], out[:, t], gates[:, t], x.stride(0), x.stride(2),
                out.stride(0), gates.stride(0), B=B, H=H, BLOCK=BLOCK,
            )  # fmt: skip
            h = out[:, t]
        ctx.save_for_backward(w, h0, gates, c, out)
        return out, c[T].to(c0.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_end: Tensor) -> tuple[Tensor, ...]:
        w, h0, gates, c, out = ctx.saved_tensors
        S, T, B, H = out.shape
        grad_out = grad_out if grad_out.stride(3) == 1 else grad_out.contiguous()
        grad_c, grad_gates = grad_end.float().contiguous().clone(), torch.empty_like(gates)
        grad_h = h0
        for t in reversed(range(T)):
            _cell_back[(S, B, triton.cdiv(H, BLOCK))](
                gates[:, t], c[t], c[t + 1], grad_out[:, t], grad_h, grad_c, grad_gates[:, t], gates.stride(0),
                grad_out.stride(0), grad_out.stride(2), B=B, H=H, LAST=t == T - 1, BLOCK=BLOCK,
            )  # fmt: skip
            grad_h = torch.bmm(grad_gates[:, t], w)
        before = torch.cat([h0.to(out.dtype)[:, None], out[:, :-1]], 1)
        grad_w = torch.bmm(grad_gates.flatten(1, 2).transpose(1, 2), before.flatten(1, 2))
        return grad_gates, grad_w.float(), grad_h.to(h0.dtype), grad_c.to(h0.dtype)
