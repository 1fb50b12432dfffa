"""A tap: the identity on an activation, with each sample's share of its mean of squares as a second output.

    s_b  = ‖a_b‖²/N                       reads a once, no temporary; N entries in all: Σ_b s_b = mean of a²
    ∂/∂a = g_a + (2/N)·g_s·a              one pass; g_a is the gradient from the layers above
    ∂/∂z = [a > 0]·g_a + (2/N)·g_s·a      where a = relu(z): replaces ReLU's own backward pass

The coefficient g_s stays a tensor, so there is no host synchronisation and a CUDA graph can capture the tap.
`benchmarks/man_cost.py` compares its cost with that of `a.square().mean()`.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fedman import kernels
from fedman.errors import UserError

HALF = (torch.float16, torch.bfloat16)


def tap(a: Tensor, z: object = None) -> tuple[Tensor, Tensor]:
    """(a, s [B]) of an activation a [B, ...]; z is what it was computed from, where that is known.

    Half precision is summed in float32. Works under autograd of any order, forward mode, vmap and torch.compile.
    """
    if torch.compiler.is_compiling():  # the compiler fuses the plain formula
        rows = a.float() if a.dtype in HALF else a
        rows = rows.reshape(*a.shape[:2], -1) if a.ndim > 1 else rows.reshape(-1, 1, 1)
        s = rows.square().sum(-1).sum(-1) / a.numel()  # of a channel at first, in any order in memory
        # a copy takes later hooks and changes in place; inductor drops it, but not always from halves that dynamo makes
        return (a if torch.compiler.is_dynamo_compiling() else a.clone()), s
    keep, entries = min(a.ndim, 1), max(a.numel(), 1)
    if transforms_active():
        return ActivationTap.apply(a, None, keep, entries)
    apply = super(torch.autograd.Function, ActivationTap).apply  # Function.apply inspects the signature: 30 µs a call
    if isinstance(z, Tensor) and _is_relu(a, z) and forward_ad.unpack_dual(z).tangent is None:
        return apply(z, a.detach(), keep, entries)
    return apply(a, None, keep, entries)


class ActivationTap(torch.autograd.Function):
    """(a, None, k, N) ↦ (a, s) or (z, relu(z), k, N) ↦ (relu(z), s); s is over all dimensions but the first k.

    The second form is for reverse mode alone: torch.func and forward mode use the first.
    """

    @staticmethod
    def forward(x: Tensor, relu: Tensor | None, keep: int, entries: int) -> tuple[Tensor, Tensor]:
        a = x if relu is None else relu
        if _kernels_apply(a, keep):
            from fedman.kernels.tap import squares

            return a.view_as(a), squares(a, keep, entries)
        rows = a if a.ndim > keep else a.unsqueeze(-1)
        dtype = torch.float32 if a.dtype in HALF else None
        norm = torch.linalg.vector_norm(rows, dim=tuple(range(keep, rows.ndim)), dtype=dtype)
        return a.view_as(a), norm.square_().div_(entries)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, relu, ctx.keep, ctx.entries = inputs
        ctx.relu, ctx.memory = relu is not None, _memory(output[0])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[0])
        ctx.save_for_forward(output[0])

    @staticmethod
    def backward(ctx: Any, grad_a: Tensor | None, grad_s: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        (a,) = ctx.saved_tensors
        fresh = not (torch.is_grad_enabled() or transforms_active())
        if fresh and grad_s is not None and _kernels_apply(a, ctx.keep) and _same_layout(grad_a, a):
            from fedman.kernels.tap import gradient

            return gradient(grad_a, a, grad_s, ctx.entries, ctx.relu), None, None, None
        if grad_a is not None and ctx.relu:
            grad_a = torch.ops.aten.threshold_backward(grad_a, a, 0)
        if grad_s is None:
            return grad_a, None, None, None
        coefficient = grad_s.reshape(grad_s.shape + (1,) * (a.ndim - ctx.keep))
        if grad_a is None:
            return (a * (coefficient * (2 / ctx.entries))).to(a.dtype), None, None, None
        # Rounded to bf16 the coefficient is as exact as the activation; that of a scaled loss may not fit float16.
        if fresh and ctx.relu and a.dtype != torch.float16:
            return grad_a.addcmul_(a, coefficient.to(a.dtype), value=2 / ctx.entries), None, None, None
        return torch.addcmul(grad_a, a, coefficient, value=2 / ctx.entries).to(a.dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> tuple[Tensor, Tensor]:
        (a,) = ctx.saved_tensors
        products = (a * tangent).reshape(*a.shape[: ctx.keep], -1)
        return tangent.view_as(tangent), products.sum(-1) * (2 / ctx.entries)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None, None], a: Tensor, relu: None, keep: int, entries: int) -> Any:
        """A stack of activations is one activation with one more leading dimension to keep."""
        return ActivationTap.apply(a.movedim(in_dims[0], 0), relu, keep + 1, entries), (0, 0)


def transforms_active() -> bool:
    """Whether this runs under vmap, grad or another transform of torch.func; False while torch.compile traces."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def unwrapped(v: Tensor) -> Tensor:
    """What a tensor under vmap consists of."""
    while torch._C._functorch.is_batchedtensor(v):
        v = torch._C._functorch.get_unwrapped(v)
    return v


def tap_of(v: object) -> Any:
    """The tap whose activation v is, or a view of it: autograd does not let anyone change it in place."""
    if not isinstance(v, Tensor) or not (inner := unwrapped(v))._is_view():
        return None
    node: Any = inner.grad_fn
    while node is not None and "ActivationTap" not in type(node).__name__:
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return node if node is not None and getattr(node, "memory", None) == _memory(inner) else None


def remember(v: object) -> None:
    """Note v where it is a tap's activation or a view of it."""
    if isinstance(v, Tensor) and (node := tap_of(v)) is not None:
        if not hasattr(node, "views"):
            node.views = []
        node.views.append(ref(v))


def set_value(v: Tensor, value: Tensor) -> Tensor:
    """v with a new value, also where a tap has measured v: all that refer to v see it, and those that see all of v in
    another shape; autograd keeps the old one. Refused where v and another view of the activation in use see parts."""
    node = tap_of(v)
    if node is None:
        return v.copy_(value)
    seen = [view for each in getattr(node, "views", ()) if (view := each()) is not None and view is not v]
    if seen and not all(view.is_contiguous() and view.numel() == v.numel() for view in (v, *seen)):
        raise UserError(IN_USE)
    node.views = []  # nothing that is weakly held is swapped
    for view in seen:
        torch.utils.swap_tensors(view, value.clone().reshape(view.shape))
    torch.utils.swap_tensors(v, value)
    return v


IN_USE = (
    "ActivationNorm: an activation is changed in place through a view, or while a view of it is in use, which cannot "
    "be done once it is measured; let the model change a copy, a = a.clone()"
)


def _memory(v: Tensor) -> int:
    """Where a tensor lies; views lie there too."""
    while torch._C._functorch.is_functorch_wrapped_tensor(v):
        v = torch._C._functorch.get_unwrapped(v)
    return v.untyped_storage()._cdata


def _is_relu(a: Tensor, z: Tensor) -> bool:
    """Whether autograd recorded a = relu(z), neither has changed since, and nothing else uses a's own gradient."""
    node = a.grad_fn
    if node is None or z.grad_fn is None or node.name() != "ReluBackward0" or a._backward_hooks or a.retains_grad:
        return False
    return node.next_functions[0] == (z.grad_fn, z.output_nr)


def _kernels_apply(a: Tensor, keep: int) -> bool:
    """Whether the GPU kernels can measure `a`."""
    return a.is_cuda and kernels.available(a.device) and _in_rows(a, keep)


def _in_rows(a: Tensor, keep: int) -> bool:
    """Whether each sample's entries are contiguous in memory, sample after sample."""
    channels_last = keep == 1 and a.ndim == 4 and a.is_contiguous(memory_format=torch.channels_last)
    return a.numel() > 0 and (a.is_contiguous() or channels_last)


def _same_layout(grad: Tensor | None, a: Tensor) -> bool:
    return grad is None or (grad.stride() == a.stride() and grad.dtype == a.dtype)
