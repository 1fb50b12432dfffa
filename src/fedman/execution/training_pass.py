"""A module's forward pass in training: random numbers from a key, statistics over the real samples of a batch.

Both are replaced where PyTorch's functions are called: by modules, functionals and a user's own layers alike.

- **Dropout** and other random numbers are a hash of (key, number of the call in the pass, coordinates of the entry). A
  client's key is its own in every step, so its masks are the same alone, in a stack, in a padded batch and after a
  restart, and both gradients of a step of SAM have the same.
- **Batch-norm** normalises by the mean and the variance of the real samples: those of padding, whose share in the
  batch's mean is zero, do not enter. A layer that sees a single value a channel, for which PyTorch raises an error,
  returns its bias and leaves its running statistics as they are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedman.errors import UserError
from fedman.execution.hashing import mix, positions, shift
from fedman.penalties.autograd import set_value

SELU_FLOOR = -1.7580993408473766  # what alpha dropout puts in place of a dropped entry, before it scales


class TrainingPass(TorchFunctionMode):
    """Active around one forward pass of one model, and around its backward pass where that repeats a part of it.

    `key`: an int64 from which random numbers come; None: zero. `weight` `[B]`: the samples' shares in the batch's mean,
    zero for padding; None: all are real.
    """

    def __init__(self, key: Tensor | None, weight: Tensor | None) -> None:
        super().__init__()
        self.key, self.weight = key, weight
        self.draws = 0  # random calls so far
        self.needed = False  # whether this pass differs from a plain one
        self.repeated = False  # whether gradient checkpointing computes a part of it again

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _UNSEEDED:
            _warn_unseeded(func)
        if func not in _REPLACED:
            return func(*args, **kwargs)
        self.repeated = self.repeated or _checkpointed()
        return _REPLACED[func](self, *args, **kwargs)

    def bits(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """63 random bits for every entry of the next random tensor of the pass."""
        if _checkpointed():
            raise UserError("model: it draws random numbers under torch.utils.checkpoint, which would draw them anew")
        self.needed, self.draws = True, self.draws + 1
        key = torch.zeros((), dtype=torch.int64, device=device) if self.key is None else self.key
        return shift(mix(mix(key, self.draws), positions(shape, device)), 1)

    def kept(self, shape: Sequence[int], p: float, device: torch.device) -> Tensor:
        """Which entries are not dropped, each with probability 1 − p."""
        return self.bits(shape, device) >= min(int(p * 2.0**63), (1 << 63) - 1)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Numbers in [0, 1)."""
        precise = torch.promote_types(dtype, torch.float32)
        left = 53 if precise == torch.float64 else 24
        return ((self.bits(shape, device) >> (63 - left)).to(precise) * 2.0**-left).to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Numbers of the standard normal distribution (Box and Muller)."""
        precise = torch.promote_types(dtype, torch.float32)
        r, angle = (self.uniform(shape, precise, device) for _ in range(2))
        return ((-2 * (1 - r).log()).sqrt() * (2 * math.pi * angle).cos()).to(dtype)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self._drop(x, p, training, inplace, x.shape)

    def dropout1d(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self._drop(x, p, training, inplace, _channels(x, batched=x.ndim != 2))

    def dropout2d(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self._drop(x, p, training, inplace, _channels(x))

    def dropout3d(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self._drop(x, p, training, inplace, _channels(x, batched=x.ndim != 4))

    def alpha_dropout(self, x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        return self._drop(x, p, training, inplace, x.shape, SELU_FLOOR)

    def feature_alpha_dropout(self, x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        return self._drop(x, p, training, inplace, _channels(x), SELU_FLOOR)

    def _drop(
        self, x: Tensor, p: float, training: bool, inplace: bool, shape: Sequence[int], floor: float = 0.0
    ) -> Tensor:
        """x where it is kept and `floor` elsewhere, scaled and shifted so that mean and variance stay."""
        self.needed = self.needed or training  # a later pass may drop, where p grows
        if not training or p == 0:
            return x
        kept = self.kept(shape, p, x.device)
        if floor == 0:
            factor = kept.to(x.dtype) * (1 / (1 - p) if p < 1 else 0.0)
            return set_value(x, x * factor) if inplace else x * factor
        scale = ((floor**2 * p + 1) * (1 - p)) ** -0.5 if p < 1 else 0.0
        dropped = x.where(kept, floor) * scale - floor * scale * p
        return set_value(x, dropped) if inplace else dropped

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`F.scaled_dot_product_attention`, by plain products where it drops."""
        if not dropout_p:
            fused = F.scaled_dot_product_attention
            return fused(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (v.repeat_interleave(groups, -3) for v in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            barred = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -math.inf) if barred else scores + attn_mask
        return self.dropout(scores.softmax(-1), dropout_p) @ value

    def multi_head_attention(self, *args: Any, **kwargs: Any) -> Any:
        """`F.multi_head_attention_forward`, whose own calls go through this pass too."""
        with self:
            return attention_body(*args, **kwargs)

    def gradient(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """`torch.autograd.grad`, in which gradient checkpointing calls parts of the model again."""
        with self:
            return gradient_body(*args, **kwargs)

    def recurrent(self, layer: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        """The layers of an LSTM, GRU or RNN one after the other where there is dropout between them.

        PyTorch passes (x, states, ...), or (x, batch sizes, states, ...) for packed sequences.
        """
        packed = isinstance(args[1], Tensor | tuple)
        sizes, (states, weights, biases, depth, dropout, training, two_ways, *order) = (
            (args[:1], args[1:]) if packed else ((), args)
        )
        if not (dropout and training and depth > 1):
            return layer(x, *args)
        ways, several = 2 if two_ways else 1, isinstance(states, tuple)
        starts = states if several else (states,)
        share, ends = len(weights) // depth, []
        for d in range(depth):
            x = x if d == 0 else self.dropout(x, dropout)
            own = tuple(v[d * ways : (d + 1) * ways] for v in starts)
            rest = weights[d * share : (d + 1) * share], biases, 1, 0.0, training, two_ways, *order
            x, *end = layer(x, *sizes, own if several else own[0], *rest)
            ends.append(end)
        return x, *(torch.cat(each) for each in zip(*ends, strict=True))

    def batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        *_: Any,
    ) -> Tensor:
        """`F.batch_norm` over the real samples."""
        several = x.shape[0] * math.prod(x.shape[2:]) > 1
        if not training or (self.weight is None and several):
            self.needed = self.needed or training
            return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        self.needed = True
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        dims, column = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))
        real = self._real(x).to(values.dtype)
        count = real.sum() * math.prod(x.shape[2:])
        share = (real / count.clamp(min=1)).view(-1, *[1] * (x.ndim - 1))
        mean = (values * share).sum(dims)
        centred = values - mean.view(column)
        var = (centred.square() * share).sum(dims)
        if running_mean is not None and running_var is not None:
            rate = momentum * (count > 1).to(values.dtype)
            running_mean.add_(rate * (mean.detach() - running_mean))
            running_var.add_(rate * (var.detach() * (count / (count - 1).clamp(min=1)) - running_var))
        out = centred * (var + eps).rsqrt().view(column)
        out = out if weight is None else out * weight.view(column)
        out = out if bias is None else out + bias.view(column)
        return out.to(x.dtype)

    def _real(self, x: Tensor) -> Tensor:
        """`[rows]`: which rows of x belong to samples that are no padding. A sample can have several rows in a row."""
        if self.weight is None:
            return torch.ones(len(x), dtype=torch.bool, device=x.device)
        rows, rest = divmod(len(x), len(self.weight))
        if rest:
            raise UserError(
                f"model: a layer has {len(x)} rows of {len(self.weight)} samples, and cannot tell which are padding; "
                "execution=plain with device=cpu needs none"
            )
        return (self.weight > 0).repeat_interleave(rows) if rows > 1 else self.weight > 0

    def instance_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """`F.instance_norm`, whose running statistics are the means of those of the real samples."""
        if running_mean is None or running_var is None or not use_input_stats:
            return F.instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        self.needed = True
        with torch.no_grad():
            real = self._real(x)[:, None]
            values = x.to(torch.promote_types(x.dtype, torch.float32)).flatten(2)
            for running, each in ((running_mean, values.mean(-1)), (running_var, values.var(-1))):
                mean = each.where(real, 0).sum(0) / real.sum().clamp(min=1)
                running.add_(momentum * (mean - running))
        return F.instance_norm(x, None, None, weight, bias, True, momentum, eps)

    def rrelu(
        self, x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
    ) -> Tensor:
        if not training:
            return F.rrelu(x, lower, upper, False, inplace)
        slope = self.uniform(x.shape, x.dtype, x.device) * (upper - lower) + lower
        value = x.where(x >= 0, x * slope)
        return set_value(x, value) if inplace else value

    def embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        """`F.embedding` with a dense gradient, none for the row of padding (which vmap forgets), and divided by the
        counts of ids in the real samples."""
        _refuse_renorm(max_norm)
        out = F.embedding(input, weight)
        if padding_idx is None and not scale_grad_by_freq:
            self.needed = self.needed or sparse
            return out
        self.needed = True
        passed = torch.ones_like(input, dtype=out.dtype)
        if scale_grad_by_freq:
            real = self._real(input).to(out.dtype).view(-1, *[1] * (input.ndim - 1)).expand(input.shape)
            counts = weight.new_zeros(len(weight)).scatter_add(0, input.flatten(), real.flatten())
            passed = passed / counts[input].clamp(min=1)
        if padding_idx is not None:
            passed = passed.where(input != padding_idx % len(weight), 0)
        return out.detach() + (out - out.detach()) * passed.unsqueeze(-1)

    def embedding_bag(
        self,
        input: Tensor,
        weight: Tensor,
        offsets: Tensor | None = None,
        max_norm: float | None = None,
        norm_type: float = 2,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        *rest: Any,
        **more: Any,
    ) -> Tensor:
        """`F.embedding_bag` with a dense gradient."""
        _refuse_renorm(max_norm)
        self.needed = self.needed or sparse
        return F.embedding_bag(input, weight, offsets, None, 2, scale_grad_by_freq, mode, False, *rest, **more)

    def rand(self, *size: Any, **how: Any) -> Tensor:
        return self.uniform(_size(size, how), *_kind(how))

    def randn(self, *size: Any, **how: Any) -> Tensor:
        return self.normal(_size(size, how), *_kind(how))

    def rand_like(self, x: Tensor, **how: Any) -> Tensor:
        return self.uniform(x.shape, *_kind(how, x))

    def randn_like(self, x: Tensor, **how: Any) -> Tensor:
        return self.normal(x.shape, *_kind(how, x))

    def bernoulli(self, x: Tensor, p: float | None = None, **_: Any) -> Tensor:
        return (self.uniform(x.shape, torch.float64, x.device) < (x if p is None else p)).to(x.dtype)

    def bernoulli_(self, x: Tensor, p: Tensor | float = 0.5, **_: Any) -> Tensor:
        return set_value(x, (self.uniform(x.shape, torch.float64, x.device) < p).to(x.dtype))

    def uniform_(self, x: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
        return set_value(x, self.uniform(x.shape, x.dtype, x.device) * (high - low) + low)

    def normal_(self, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
        return set_value(x, self.normal(x.shape, x.dtype, x.device) * std + mean)


def _body(function: Any) -> Callable[..., Any]:
    """The function without its check for a mode that overrides it: the calls inside it then go through the mode."""
    seen = {name: v for name, v in function.__globals__.items() if name != "__name__"} | {
        "has_torch_function": lambda tensors: False
    }
    return FunctionType(function.__code__, seen, function.__name__, function.__defaults__, function.__closure__)


attention_body = _body(F.multi_head_attention_forward)
"""For modes that replace calls inside `F.multi_head_attention_forward`."""

gradient_body = _body(torch.autograd.grad)


def _channels(x: Tensor, batched: bool = True) -> tuple[int, ...]:
    """The shape of a mask that drops whole channels."""
    kept = 2 if batched else 1
    return (*x.shape[:kept], *[1] * (x.ndim - kept))


def _size(size: Sequence[Any], how: dict[str, Any]) -> Sequence[int]:
    given = how.get("size", size[0] if len(size) == 1 else size)
    return (given,) if isinstance(given, int) else tuple(given)


def _kind(how: dict[str, Any], like: Tensor | None = None) -> tuple[torch.dtype, torch.device]:
    dtype = how.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
    device = how.get("device") or (torch.empty(0) if like is None else like).device
    return dtype, torch.device(device)


def _checkpointed() -> bool:
    """Whether this call will be repeated by gradient checkpointing, in the backward pass."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and "checkpoint" in getattr(hooks[0], "__qualname__", "")


def _refuse_renorm(max_norm: float | None) -> None:
    if max_norm is not None:
        raise UserError("model: an embedding with max_norm changes its weights in the forward pass; leave max_norm out")


def _warn_unseeded(func: Callable[..., Any]) -> None:
    warnings.warn(
        f"the model calls {func.__name__}, whose random numbers do not come from the run's seed: "
        "runs repeated or resumed will differ",
        stacklevel=2,
    )


def _layer(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: self.recurrent(func, *args)


_REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: TrainingPass.dropout,
    torch.dropout: TrainingPass.dropout,
    F.dropout1d: TrainingPass.dropout1d,
    F.dropout2d: TrainingPass.dropout2d,
    F.dropout3d: TrainingPass.dropout3d,
    torch.feature_dropout: TrainingPass.dropout2d,
    F.alpha_dropout: TrainingPass.alpha_dropout,
    torch.alpha_dropout: TrainingPass.alpha_dropout,
    F.feature_alpha_dropout: TrainingPass.feature_alpha_dropout,
    F.scaled_dot_product_attention: TrainingPass.attention,
    F.multi_head_attention_forward: TrainingPass.multi_head_attention,
    **{func: _layer(func) for func in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    torch.autograd.grad: TrainingPass.gradient,
    F.embedding: TrainingPass.embedding,
    F.embedding_bag: TrainingPass.embedding_bag,
    F.batch_norm: TrainingPass.batch_norm,
    torch.batch_norm: TrainingPass.batch_norm,
    F.instance_norm: TrainingPass.instance_norm,
    F.rrelu: TrainingPass.rrelu,
    torch.rand: TrainingPass.rand,
    torch.randn: TrainingPass.randn,
    torch.rand_like: TrainingPass.rand_like,
    torch.randn_like: TrainingPass.randn_like,
    torch.bernoulli: TrainingPass.bernoulli,
    Tensor.bernoulli: TrainingPass.bernoulli,
    Tensor.bernoulli_: TrainingPass.bernoulli_,
    Tensor.uniform_: TrainingPass.uniform_,
    Tensor.normal_: TrainingPass.normal_,
}

_UNSEEDED = {
    *(torch.randint, torch.randint_like, torch.randperm, torch.multinomial, torch.normal, torch.poisson),
    *(Tensor.multinomial, Tensor.random_, Tensor.exponential_, Tensor.geometric_, Tensor.log_normal_, Tensor.cauchy_),
    *(F.gumbel_softmax, F.fractional_max_pool2d, F.fractional_max_pool3d),
}
"""Random functions without a replacement."""
