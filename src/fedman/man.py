"""MAN: minimise layerwise activation norms. A regulariser for any `nn.Module`.

    R = Σ_l 1/(B·n_l) Σ_b ‖a_l,b‖²      l: the output of every nonlinearity, and the logits; n_l entries a sample

from "Minimizing Layerwise Activation Norm Improves Generalization in Federated Learning" (WACV 2024). Each term
is the second moment of an entry of a layer; the loss of a client is L + ζR.

    man = ActivationNorm(model)
    loss = cross_entropy(model(x), y) + 0.15 * man()

The gradient of R with respect to a_l is a multiple of a_l itself. So an activation is read once on the way
forward and once on the way back, in the same pass that carries its other gradient; there is no temporary of its
size, and nothing is kept after the step.
"""

from __future__ import annotations

import difflib
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from fedman.errors import UserError

Measure = Callable[[Tensor], Tensor]

ACTIVATION_MODULES = tuple(
    getattr(nn, name)
    for name in nn.modules.activation.__all__
    if name not in ("MultiheadAttention", "Softmin", "Softmax", "Softmax2d", "LogSoftmax")
)
ACTIVATION_FUNCTIONS: dict[Any, str] = {
    function: name
    for name in [
        "relu",
        "relu6",
        "leaky_relu",
        "prelu",
        "rrelu",
        "elu",
        "selu",
        "celu",
        "gelu",
        "silu",
        "mish",
        "hardswish",
        "hardtanh",
        "tanh",
        "sigmoid",
        "hardsigmoid",
        "logsigmoid",
        "softplus",
        "softsign",
        "softshrink",
        "hardshrink",
        "tanhshrink",
        "threshold",
        "glu",
    ]
    for home in (F, torch, Tensor)
    for spelling in (name, name + "_")
    if (function := getattr(home, spelling, None)) is not None
}
HALF = (torch.float16, torch.bfloat16)


class _Tap(torch.autograd.Function):
    """a ↦ (a, s): the activation itself, and its mean of squares over all dimensions but the first `keep`.

    Forward: s = ‖a‖²/n, one reading pass. Backward: g_a + (2/n)·g_s·a, one fused pass whose coefficient stays a
    tensor (no host synchronisation: a CUDA graph can capture it).
    """

    @staticmethod
    def forward(a: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        rows = a if a.ndim > keep else a.unsqueeze(-1)
        dtype = torch.float32 if a.dtype in HALF else None
        norm = torch.linalg.vector_norm(rows, dim=tuple(range(keep, rows.ndim)), dtype=dtype)
        return a.view_as(a), norm.square_().div_(math.prod(a.shape[keep:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        a, keep = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a)
        ctx.save_for_forward(a)
        ctx.keep, ctx.n = keep, math.prod(a.shape[keep:])

    @staticmethod
    def backward(ctx: Any, grad_a: Tensor | None, grad_s: Tensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        if grad_s is None:
            return grad_a, None
        (a,) = ctx.saved_tensors
        coefficient = grad_s.reshape(grad_s.shape + (1,) * (a.ndim - ctx.keep))
        if grad_a is None:
            return (a * (coefficient * (2 / ctx.n))).to(a.dtype), None
        return torch.addcmul(grad_a, a, coefficient, value=2 / ctx.n).to(a.dtype), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (a,) = ctx.saved_tensors
        products = (a * tangent).reshape(*a.shape[: ctx.keep], -1)
        return tangent.view_as(tangent), products.sum(-1) * (2 / ctx.n)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], a: Tensor, keep: int) -> Any:
        """A stack of activations is one activation with one more dimension to keep."""
        assert in_dims[0] is not None
        return _Tap.apply(a.movedim(in_dims[0], 0), keep + 1), (0, 0)


def _mean_of_squares(a: Tensor) -> tuple[Tensor, Tensor]:
    """An activation [B, ...] with its tap: (a, s), s [B]. A compiler fuses the plain formula by itself."""
    if torch.compiler.is_compiling():
        exact = a.float() if a.dtype in HALF else a
        return a, exact.reshape(exact.shape[:1] + (-1,)).square().mean(-1)
    if torch._C._are_functorch_transforms_active():
        return _Tap.apply(a, min(a.ndim, 1))
    return super(torch.autograd.Function, _Tap).apply(a, min(a.ndim, 1))


@dataclass
class _Pass:
    """One forward pass of the model: what it has left so far."""

    grad: bool
    taps: dict[str, Tensor] = field(default_factory=dict)  # per-sample values [B] by layer, in order of use
    uses: dict[str, int] = field(default_factory=dict)
    last: Any = None  # the activation tapped last
    depth: int = 1  # calls of the model under way: more than one where it calls itself
    muted: int = 0  # activation modules under way

    def tap(self, name: str, out: Any, measure: Measure | None = None, first: str = "") -> Any:
        """Measure an output as layer `name` (its first use as `name + first`) and return what takes its place."""
        leaves, spec = ([out], None) if isinstance(out, Tensor) else tree_flatten(out)
        i = _position(name, leaves)
        a = leaves[i]
        if name == "output" and a is self.last:
            return out
        if self.grad and not torch.is_grad_enabled() and any(_frames(CheckpointFunction.forward.__code__)):
            raise UserError(f"ActivationNorm: layer {name!r} is checkpointed with use_reentrant=True; use False")
        if measure is None:
            leaves[i], s = _mean_of_squares(a)
        else:
            s = measure(a)
            if s.shape != a.shape[:1]:
                raise UserError(
                    f"layers: the measure of {name!r} maps {tuple(a.shape)} to {tuple(s.shape)}, not to {tuple(a.shape[:1])}"
                )
        self.last = leaves[i]
        k = self.uses[name] = self.uses.get(name, 0) + 1
        self.taps[f"{name}#{k}" if k > 1 else name + first] = s if s.ndim else s.unsqueeze(0)
        return leaves[0] if spec is None else tree_unflatten(leaves, spec)


class _FunctionalTaps(TorchFunctionMode):
    """On while the model runs: calls of `F.relu`, `torch.tanh`, `x.sigmoid()`, ... are taps too."""

    def __init__(self, man: ActivationNorm) -> None:
        super().__init__()
        self.man = man

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = ACTIVATION_FUNCTIONS.get(func)
        return out if name is None else self.man._tap_function(self, name, out)


class ActivationNorm:
    """The MAN term of the model's latest forward pass: `model(x)`, then `man()`.

    `layers`: None taps the output of every activation module and of every functional activation in the model's
    forward pass, in order of use; an iterable of module names taps the outputs of these modules; a mapping from
    names to measures does so with measures other than the mean of squares: functions from an activation [B, ...]
    to values [B]. `output`: whether the model's output (the logits) is a layer too; where the model ends in a
    tapped layer, that is its output and counts once. Of an output with several tensors the first one counts.

    Only the latest forward pass counts, and once: `man()` and `man.terms()` consume it. To sum over several
    passes (two views of a batch, accumulation of gradients), call `man()` after each. One model has one
    ActivationNorm: a new one takes the place of the old. Use a model and its ActivationNorm in one thread at a
    time; copies of the model, each with its own, run side by side.

    Under gradient checkpointing (`use_reentrant=False`) the activation of a tapped module is recomputed as
    usual; that of a functional call inside the checkpointed part is kept.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: str | Iterable[str] | Mapping[str, Measure] | None = None,
        *,
        output: bool = True,
    ) -> None:
        chosen = _choose(model, layers)
        for hook in list(model._forward_pre_hooks.values()):
            if isinstance(former := getattr(hook, "__self__", None), ActivationNorm):
                former.remove()
        self._output = output
        self._functional = _FunctionalTaps(self) if layers is None else None
        self._running: _Pass | None = None
        self._done: _Pass | None = None
        self._values: tuple[tuple[str, ...], Tensor | None] = ((), None)
        self._handles = [model.register_forward_pre_hook(self._enter)]
        for name, (module, measure) in chosen.items():
            if layers is None:
                self._handles.append(module.register_forward_pre_hook(self._mute))
            self._handles.append(module.register_forward_hook(partial(self._tap_module, name, measure)))
        self._handles.append(model.register_forward_hook(self._leave, always_call=True))

    def __call__(self, weight: Tensor | None = None) -> Tensor:
        """R = Σ_l Σ_b weight_b·s_l,b with s_l,b the mean of squares of sample b's entries; None is 1/B each."""
        return self._take(weight)[1].sum()

    def terms(self, weight: Tensor | None = None) -> dict[str, Tensor]:
        """The terms of R by layer, in order of use; `man()` is their sum."""
        names, values = self._take(weight)
        return dict(zip(names, values.unbind(), strict=True))

    @property
    def values(self) -> dict[str, float]:
        """The terms of the last `man()` or `man.terms()` as numbers; empty before it and inside torch.func."""
        names, values = self._values
        return {} if values is None else dict(zip(names, values.tolist(), strict=True))

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._done = None

    def __enter__(self) -> ActivationNorm:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles of a model with its hooks: all but what a forward pass left."""
        return {**self.__dict__, "_running": None, "_done": None, "_values": ((), None)}

    def _take(self, weight: Tensor | None) -> tuple[tuple[str, ...], Tensor]:
        """The names and the values [L] of the terms; the pass is let go of."""
        done, self._done = self._done, None
        if done is None:
            raise UserError("ActivationNorm: no forward pass to measure; call the model before each man()")
        if not done.taps:
            raise UserError("ActivationNorm: the model has no activation to measure; name layers=[...], or output=True")
        names, samples = tuple(done.taps), list(done.taps.values())
        for name, s in done.taps.items():
            if weight is not None and s.shape != weight.shape:
                raise UserError(
                    f"weight: shape {tuple(weight.shape)} does not fit layer {name!r} with {len(s)} samples"
                )
        if all(len(s) == len(samples[0]) for s in samples):
            rows = torch.stack(samples)
            values = rows.mean(1) if weight is None else (rows * weight.to(rows.dtype)).sum(1)
        else:
            values = torch.stack([s.mean() for s in samples])
        wrapped = not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(values)
        self._values = (names, None if wrapped else values.detach())
        return names, values

    def _enter(self, model: nn.Module, args: Any) -> None:
        if _recomputing(model):
            return
        if self._running is not None:
            if sum(frame.f_locals["self"] is model for frame in _frames(nn.Module._call_impl.__code__)) > 1:
                self._running.depth += 1
                return
            self._forget_interrupted()
        self._done, self._running = None, _Pass(torch.is_grad_enabled())
        if self._functional is not None:
            self._functional.__enter__()

    def _leave(self, model: nn.Module, args: Any, out: Any) -> Any:
        again = _recomputing(model)
        current = _Pass(True) if again else self._running
        if current is None:
            return None
        current.depth -= 1
        if current.depth:
            return None
        if not again:
            self._running = None
            if self._functional is not None:
                self._functional.__exit__(None, None, None)
        if out is None:  # the forward pass has failed
            return None
        if self._output:
            out = current.tap("output", out)
        if not again:
            current.last, self._done = None, current
        return out

    def _forget_interrupted(self) -> None:
        """After Ctrl-C in the model's forward, which no hook hears of: take off the mode that it left on."""
        if self._functional is not None:
            if torch.overrides._get_current_function_mode() is self._functional:
                self._functional.__exit__(None, None, None)
            self._functional = _FunctionalTaps(self)

    def _mute(self, module: nn.Module, args: Any) -> None:
        """An activation module's own functional calls are no taps of their own."""
        if self._running is not None and not _recomputing(module):
            self._running.muted += 1

    def _tap_module(self, name: str, measure: Measure | None, module: nn.Module, args: Any, out: Any) -> Any:
        if _recomputing(module):  # what the first run saved for the backward pass, this one has to save too
            return _Pass(True).tap(name, out, measure)
        if self._running is None:
            return None
        if self._functional is not None:
            self._running.muted -= 1
        with torch._C.DisableTorchFunction():
            return self._running.tap(name, out, measure)

    def _tap_function(self, mode: _FunctionalTaps, name: str, out: Tensor) -> Any:
        current = self._running
        if current is None or current.muted or mode is not self._functional or not _is_real(out):
            return out
        with _outside_checkpoint():
            return current.tap(name, out, first="#1")


def _choose(
    model: nn.Module, layers: str | Iterable[str] | Mapping[str, Measure] | None
) -> dict[str, tuple[nn.Module, Measure | None]]:
    """The modules to tap by name, with their measures (None: the mean of squares)."""
    modules = dict(model.named_modules())
    if layers is None:
        return {n: (m, None) for n, m in modules.items() if n and isinstance(m, ACTIVATION_MODULES)}
    names = [layers] if isinstance(layers, str) else list(layers)
    for name in names:
        if not name or name not in modules:
            near = difflib.get_close_matches(str(name), modules, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, list(modules)[1:]))}"
            raise UserError(f"layers: the model has no module {name!r}; {hint}")
        if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
            raise UserError(
                f"layers: {name!r} is a {type(modules[name]).__name__}, which is never called; name its members"
            )
    measures = layers if isinstance(layers, Mapping) else {}
    for name, measure in measures.items():
        if not callable(measure):
            raise UserError(f"layers: the measure of {name!r} is {measure!r}, not a function of an activation")
    return {name: (modules[name], measures.get(name)) for name in names}


def _position(name: str, leaves: list[Any]) -> int:
    """Which of an output's leaves is the activation: the only tensor, or the first real one with samples."""
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and _is_real(leaf) and (leaf.ndim or len(leaves) == 1):
            return i
    what = "the model's output" if name == "output" else f"the output of layer {name!r}"
    kinds = ", ".join(str(x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in leaves)
    advice = "use output=False" if name == "output" else "name other layers"
    raise UserError(f"ActivationNorm: {what} holds no real tensor ({kinds or 'nothing'}); {advice}")


def _is_real(a: Tensor) -> bool:
    return a.is_floating_point()


def _frames(code: CodeType) -> Iterator[FrameType]:
    """The calls of a function that are under way in this thread."""
    return (frame for frame, _ in traceback.walk_stack(None) if frame.f_code is code)


def _recomputing(module: nn.Module) -> bool:
    """Whether gradient checkpointing runs `module` for the second time, inside the backward pass."""
    if torch.compiler.is_compiling():
        return False
    if "_is_replica" in vars(module):
        raise UserError("ActivationNorm: nn.DataParallel's replicas cannot be measured; use DistributedDataParallel")
    return torch._C._current_graph_task_id() != -1


def _outside_checkpoint() -> AbstractContextManager[Any]:
    """Keep what is saved for the backward pass out of a checkpoint's hands.

    A checkpoint expects its second run to save the same tensors as its first, but functional calls are not seen
    in the second: the mode that sees them is off in the backward pass.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":
        return nullcontext()
    return saved_tensors_hooks(lambda a: a, lambda a: a)
