"""Operations that `torch.func.vmap` stacks badly, replaced where a module or a task calls them. On a GPU:

- **Convolutions** would become grouped ones, which cuDNN computes group by group. Our kernels take all models at once.
- **Attention** has no weights: the models' batches are joined into one.
- **Linear layers** of more than two dimensions could become a product for every sample with a copy of the weights.
- **GroupNorm and batch-norm** would be normalised and scaled in two operations, each with its own sums in the backward
  pass; batch-norm would also move the models to the channels.
- **Cross-entropy** would gather, and scatter in the backward pass.

On a CPU, where models are stacked because calls cost more than arithmetic, it is cross-entropy, which PyTorch puts
together in Python, at every call, and imports sympy for; and attention, of which vmap can stack plain products alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fedman import kernels
from fedman.execution.training_pass import attention_body


def applies(W: Tensor) -> bool:
    """Whether all these operations are replaced: on a GPU."""
    return W.is_cuda


class StackableOperations(TorchFunctionMode):
    """Active around a forward pass under vmap, on a GPU."""

    slow = ""  # the name of a convolution that was not replaced

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.multi_head_attention_forward:
            with self:
                return attention_body(*args, **(kwargs or {}))
        if func in _GROUPED or (func is torch.conv2d and not _served(*args, **(kwargs or {}))):
            self.slow = func.__name__
            return func(*args, **(kwargs or {}))
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


class StackableOnCPU(TorchFunctionMode):
    """The same on a CPU, with the bits of PyTorch's own."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.multi_head_attention_forward:
            with self:
                return attention_body(*args, **(kwargs or {}))
        return _REPLACED_ON_CPU.get(func, func)(*args, **(kwargs or {}))


def _served(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    """Whether the kernels serve a `F.conv2d`: with a square kernel, one stride, no dilation, one group."""
    *_, height, width = weight.shape
    border = _border(padding, width)
    square = input.ndim == 4 and height == width and len(set(_both(stride))) == 1
    plain = groups == 1 and _both(dilation) == (1, 1)
    return _has_kernels(input) and square and plain and border is not None and border < width


def _conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, *_: Any, **__: Any
) -> Tensor:
    """`F.conv2d` by the kernels."""
    x, w, kernel, step = input, weight.float(), weight.shape[-1], _both(stride)[0]
    border = _border(padding, kernel)
    assert border is not None  # `_served` has said so
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    precision = "bf16" if x.dtype == torch.bfloat16 else "tf32" if torch.backends.cudnn.allow_tf32 else "fp32"
    if w.shape[1] <= IMAGE and kernel > 1:
        x, w, step, border = _patches(x, kernel, step, border), _as_patches(w), 1, 0
    z: Tensor = _Convolution.apply(x, w, step, border, precision)
    return z if bias is None else z + bias.to(z.dtype)[:, None, None]


IMAGE = 4
"""Channels of an image at most: too few for a product over the channels of a pixel. Patches are written out instead."""


def _patches(x: Tensor, kernel: int, stride: int, border: int) -> Tensor:
    """x [B, C, H, W] as [B, k·k·C, OH, OW]: a pixel's channels are its patch, filled up with zeros."""
    x = F.pad(x, [border] * 4).unfold(2, kernel, stride).unfold(3, kernel, stride)  # [B, C, OH, OW, k, k]
    x = x.permute(0, 4, 5, 1, 2, 3).flatten(1, 3)
    return F.pad(x, [0, 0, 0, 0, 0, -x.shape[1] % 32])


def _as_patches(w: Tensor) -> Tensor:
    """w [O, C, k, k] for `_patches`: [O, k·k·C, 1, 1]."""
    w = w.permute(0, 2, 3, 1).flatten(1)
    return F.pad(w, [0, -w.shape[1] % 32])[:, :, None, None]


def _has_kernels(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.bfloat16) and kernels.available(x.device)


def _both(value: Any) -> tuple[int, int]:
    """A number for height and width alike, or one for each."""
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _border(padding: Any, kernel: int) -> int | None:
    """Rows and columns of zeros on every side; None where the sides differ."""
    if isinstance(padding, str):
        return 0 if padding == "valid" else None if kernel % 2 == 0 else kernel // 2
    height, width = _both(padding)
    return height if height == width else None


class OfAllModels(torch.autograd.Function):
    """A function under vmap that gets all models at once; a subclass has the rule `vmap`."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        raise NotImplementedError("a transform of torch.func other than vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


def models_first(v: Tensor, dim: int | None, size: int) -> Tensor:
    """An input of a vmap rule with the dimension of the `size` models in front."""
    return v.expand(size, *v.shape) if dim is None else v.movedim(dim, 0)


class _Convolution(OfAllModels):
    """A convolution by the kernels."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, w: Tensor, *geometry: Any) -> Any:
        from fedman.kernels.convolution import StackedConv

        x, w = (models_first(v, dim, info.batch_size) for v, dim in zip((x, w), in_dims, strict=False))
        return StackedConv.apply(x, w, *geometry), 0


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of all models as one batch, where no mask tells samples apart."""
    alike = query.ndim > 2 and len(query) == len(key) == len(value)
    if attn_mask is not None or dropout_p or enable_gqa or not alike:
        rest = attn_mask, dropout_p, is_causal
        with sdpa_kernel(SDPBackend.MATH):  # the only form that vmap can stack
            return F.scaled_dot_product_attention(query, key, value, *rest, scale=scale, enable_gqa=enable_gqa)
    out: Tensor = _Attention.apply(query, key, value, is_causal, scale)
    return out


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` by plain products. `sdpa_kernel` would change what other threads compute."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = query.new_zeros(()).where(attn_mask, -math.inf)
    products, how = torch.ops.aten._scaled_dot_product_attention_math, {"scale": scale, "enable_gqa": enable_gqa}
    out: Tensor = products(query, key, value, attn_mask, dropout_p, is_causal, **how)[0]
    return out


class _Attention(OfAllModels):
    """Attention, with models and samples as one dimension."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        *tensors, is_causal, scale = inputs
        S = info.batch_size
        q, k, v = (models_first(t, dim, S).flatten(0, 1) for t, dim in zip(tensors, in_dims, strict=False))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        return out.unflatten(0, (S, -1)), 0


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with all but the last dimension as one."""
    if input.ndim < 3:
        return F.linear(input, weight, bias)
    return F.linear(input.reshape(-1, input.shape[-1]), weight, bias).unflatten(0, input.shape[:-1])


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`F.group_norm`."""
    if input.ndim < 2 or input.shape[1] % num_groups:
        return F.group_norm(input, num_groups, weight, bias, eps)  # which says what is wrong
    x = input.float() if torch.is_autocast_enabled(input.device.type) else input
    var, mean = _Moments.apply(x.unflatten(1, (num_groups, -1)), tuple(range(2, x.ndim + 1)))
    var, mean = (v.repeat_interleave(x.shape[1] // num_groups, 1) for v in (var, mean))
    return _scaled(x, mean, var, weight, bias, eps)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """`F.batch_norm`."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    var, mean = _Moments.apply(x, (0, *range(2, x.ndim)))
    if running_mean is not None and running_var is not None:
        entries = x.shape[0] * x.shape[2:].numel()
        running_mean.add_(momentum * (mean.detach() - running_mean))
        running_var.add_(momentum * (var.detach() * (entries / (entries - 1)) - running_var))
    return _scaled(x, mean[None], var[None], weight, bias, eps).to(input.dtype)


class _Moments(torch.autograd.Function):
    """Variance and mean over some dimensions. PyTorch's own backward pass reads x once more, to compute the mean again.

    ∂var/∂x = 2 (x − mean) / n, ∂mean/∂x = 1 / n.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return torch.var_mean(x, dims, correction=0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.dims = inputs
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, dvar: Tensor, dmean: Tensor) -> tuple[Tensor, None]:
        x, mean = ctx.saved_tensors

        def over(v: Tensor) -> Tensor:  # with dimensions of one entry for those that are summed
            for dim in sorted(ctx.dims):
                v = v.unsqueeze(dim)
            return v

        n = math.prod(x.shape[dim] for dim in ctx.dims)
        return (x - over(mean)) * over(dvar * (2 / n)) + over(dmean / n), None


def _scaled(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x − mean) / σ · weight + bias by channel, as one product and one sum.

    The backward pass then needs two sums over the pixels of a channel, from which all other gradients follow; of the
    norm and its scale one after the other it would need four.
    """
    scale = (var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return x * _pixels(scale, x) + _pixels(shift, x)


def _pixels(v: Tensor, x: Tensor) -> Tensor:
    """A value for every channel, or for every sample and channel, as a factor of x [B, C, ...]."""
    return v.reshape(*v.shape, *[1] * (x.ndim - 2))


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy`. The gradient of a gathered class would be scattered, for which deterministic kernels sort."""
    deprecated = size_average is not None or reduce is not None
    if target.is_floating_point() or input.ndim < 2 or weight is not None or deprecated or label_smoothing:
        rest = weight, size_average, ignore_index, reduce, reduction, label_smoothing
        return F.cross_entropy(input, target, *rest)
    classes = torch.arange(input.shape[1], device=input.device).reshape(-1, *[1] * (input.ndim - 2))
    loss = -input.log_softmax(1).where(classes == target.unsqueeze(1), 0).sum(1)
    counted = target != ignore_index
    loss = loss.where(counted, 0)
    if reduction == "none":
        return loss
    return loss.sum() / counted.sum() if reduction == "mean" else loss.sum()


_GROUPED = {
    *(torch.conv1d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
}
"""Convolutions without kernels of our own."""

_REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.conv2d: _conv2d,
    F.scaled_dot_product_attention: _attention,
    F.linear: _linear,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.cross_entropy: _cross_entropy,
}

_REPLACED_ON_CPU: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: _plain_attention,
    F.cross_entropy: _cross_entropy,
}
