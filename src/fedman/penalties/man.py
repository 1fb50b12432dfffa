"""MAN: minimise layerwise activation norms. A regularisation term for any `nn.Module`.

    R = Σ_l 1/(B·n_l) Σ_b ‖a_l,b‖²        l: every nonlinearity's output and the logits; n_l entries a sample

from "Minimizing Layerwise Activation Norm Improves Generalization in Federated Learning" (WACV 2024). Each term is
the mean of squares of a layer's entries; a client's loss is L + ζR.

    man = ActivationNorm(model)
    loss = cross_entropy(model(x), y) + 0.15 * man()

This file finds the activations; `fedman.penalties.recurrent` knows where recurrent layers have their samples,
`fedman.penalties.autograd` computes the mean of squares, `fedman.penalties.measures` has what else can be measured.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from itertools import chain, count
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from fedman.errors import UserError, nearest
from fedman.penalties.autograd import (
    remember,
    set_value,
    tap,
    tap_of,
    transforms_active,
)
from fedman.penalties.measures import Measure, OfBatch
from fedman.penalties.recurrent import CELLS, RECURRENT, PackedSequence, by_samples, samples_first

Layers = str | Iterable[str] | Mapping[str, Measure] | None

ACTIVATION_MODULES = tuple(
    getattr(nn, name)
    for name in nn.modules.activation.__all__
    if name not in ("MultiheadAttention", "Softmin", "Softmax", "Softmax2d", "LogSoftmax")
)
ACTIVATION_FUNCTIONS: dict[Any, str] = {
    function: name
    for name in (
        "relu", "relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu", "mish", "glu",
        "tanh", "hardtanh", "tanhshrink", "sigmoid", "hardsigmoid", "logsigmoid", "hardswish", "softplus", "softsign",
        "softshrink", "hardshrink", "threshold",
    )
    for home in (F, torch, Tensor)
    for spelling in (name, name + "_")
    if (function := getattr(home, spelling, None)) is not None
}  # fmt: skip
CHECKPOINT: CodeType = inspect.unwrap(checkpoint).__code__


@dataclass
class _Pass:
    """What has been measured so far in one forward pass of the model."""

    grad: bool  # whether gradients were enabled when it began
    taps: dict[str, Tensor | OfBatch] = field(default_factory=dict)  # by layer, in order of use: samples' shares [B]
    steps: dict[str, list[Tensor]] = field(default_factory=dict)  # by recurrent cell: the shares of its calls
    last: Tensor | PackedSequence | None = None  # the activation tapped last
    depth: int = 1  # nested calls of the model: more than one where it calls itself
    muted: int = 0  # activation modules being called: their functional calls do not count

    def tap(
        self,
        name: str,
        out: Any,
        z: Any = None,
        measure: Measure | None = None,
        first: str = "",
        module: nn.Module | None = None,
    ) -> Any:
        """Measure `out`, computed from z by `module`, as layer `name` ("" is the model itself).

        Its first use counts as `name + first`, the others as `name#2`, `name#3`, ..., skipping what is taken; the
        steps of a recurrent cell are one layer. Returns the output to pass on.
        """
        leaves, spec = ([out], None) if isinstance(out, Tensor) else tree_flatten(out, _is_packed)
        i = _position(name, leaves)
        if not name and leaves[i] is self.last:
            return out
        if self.grad and not torch.is_grad_enabled() and any(_frames(CheckpointFunction.forward.__code__)):
            raise UserError(f"ActivationNorm: layer {name!r} is checkpointed with use_reentrant=True; use False")
        leaves[i], s = _measured(name, leaves[i], z, measure, module)
        self.last = leaves[i]
        if not torch.compiler.is_compiling():
            remember(self.last)
        if isinstance(s, Tensor):
            s = s if s.ndim else s.unsqueeze(0)
        elif _is_packed(leaves[i]) or isinstance(module, CELLS):
            what = "needs a whole batch, which packed sequences and recurrent cells do not show"
            raise UserError(f"layers: the measure of {name!r} {what}")
        if name and isinstance(module, CELLS) and isinstance(s, Tensor):
            self.taps[name] = s  # until `finish`
            self.steps.setdefault(name, []).append(s)
        else:
            name = name or "output"
            keys = chain([name + first], (f"{name}#{k}" for k in count(2)))
            self.taps[next(key for key in keys if key not in self.taps)] = s
        return leaves[0] if spec is None else tree_unflatten(leaves, spec)

    def finish(self) -> None:
        """The last of the pass: a cell's steps are averaged."""
        for name, steps in self.steps.items():
            self.taps[name] = reduce(_added, steps) / len(steps)
        self.last = None


class _FunctionalTaps(TorchFunctionMode):
    """Active while the model runs: taps calls of `F.relu`, `torch.tanh`, `x.sigmoid()`, ... too.

    An activation that is changed in place after it was measured (`a += b`) becomes a new tensor. Views of it would not
    see that: the change is refused while there are any.
    """

    def __init__(self, man: ActivationNorm) -> None:
        super().__init__()
        self.man = man

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, current = kwargs or {}, self.man._running
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            if "is a view and is being modified inplace" not in str(error) or not args or tap_of(args[0]) is None:
                raise
            out = _on_copy(func, args, kwargs)
        if not torch.compiler.is_compiling():
            for v in out if isinstance(out, tuple) else (out,):
                remember(v)
        name = ACTIVATION_FUNCTIONS.get(func)
        if current is None or current.muted or self.man._functional is not self:
            return out
        if not torch.compiler.is_dynamo_compiling() and args and args[0] is current.last:
            current.last = None if _writes(func, args, kwargs) else current.last
        if name is None or not out.is_floating_point():
            return out
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and any(_frames(CHECKPOINT)):
            # Its recomputation in the backward pass saves less than the first run: the mode is off there.
            raise UserError(f"ActivationNorm: {name} is called as a function in a checkpointed part; use its nn.Module")
        return current.tap(name, out, args[0] if args else None, self.man._measure, "#1")


class ActivationNorm:
    """The MAN term of the model's latest forward pass: `model(x)`, then `man()`.

    `layers`: None taps the output of every activation module, of every functional activation and of every recurrent
    layer in the forward pass, in order of use; an iterable of module names taps the outputs of these modules; a mapping
    from names to measures does so with measures other than the mean of squares: functions from an activation [B, ...]
    to values [B], or, where these depend on the whole batch, to a function from its samples' weights [B] (None: equal
    ones) to values [B]. `measure` replaces the mean of squares for all layers that have none of their own. `output`:
    whether the model's output (the logits) is a layer too; where the model ends in a tapped layer, that counts once. Of
    an output with several tensors the first one counts.

    Of `nn.LSTM`, `nn.GRU` and `nn.RNN` the output sequence counts, every step of it an entry: of several layers in one
    module that is the last layer's, since the module does not return the others (one module a layer counts them
    all). Of `nn.LSTMCell` and the other cells the hidden state counts; the steps of a cell are one layer, their mean
    its term. Steps of padding in a `PackedSequence` do not exist: a sample's entries are its own steps.
    Where nothing is found to measure but the model's output, training with it gives a warning.

    Only the latest forward pass counts, and once: `man()` and `man.terms()` consume it. To sum over several
    passes (two views of a batch, accumulation of gradients), call `man()` after each. One model has one
    ActivationNorm: a new one replaces the old. Use a model and its ActivationNorm in one thread at a
    time; copies of the model, each with its own, run side by side.

    Under gradient checkpointing (`use_reentrant=False`) the activation of a tapped module is recomputed as usual.
    Functional activations inside a checkpointed part are refused.

    An activation that the model then changes in place (`a += b`, `a[:, 0] = 1`) counts as it was before; with `layers`,
    PyTorch refuses the change. A change through a view (`a[:, 0] += 1`), or while a view is in use, is refused.
    """

    def __init__(
        self, model: nn.Module, layers: Layers = None, *, output: bool = True, measure: Measure | None = None
    ) -> None:
        chosen = _choose(model, layers)
        for hook in list(model._forward_pre_hooks.values()):
            if isinstance(former := getattr(hook, "__self__", None), ActivationNorm):
                former.remove()
        self._output, self._measure, self._warned = output, measure, False
        self._functional = _FunctionalTaps(self) if layers is None else None
        self._running: _Pass | None = None
        self._done: _Pass | None = None
        self._report: tuple[tuple[str, ...], Tensor | None] = ((), None)
        self._handles = [model.register_forward_pre_hook(self._enter)]
        for name, (module, own) in chosen.items():
            if layers is None:
                self._handles.append(module.register_forward_pre_hook(self._mute))
            self._handles.append(module.register_forward_hook(partial(self._tap_module, name, own or measure)))
        self._handles.append(model.register_forward_hook(self._leave, always_call=True))

    def __call__(self, weight: Tensor | None = None) -> Tensor:
        """R = Σ_l Σ_b weight_b·s_l,b, where s_l,b is sample b's mean of squares; without weights each has 1/B."""
        return self._take(weight)[1].sum()

    def terms(self, weight: Tensor | None = None) -> dict[str, Tensor]:
        """The terms of R by layer, in order of use; `man()` is their sum."""
        names, shares = self._take(weight)
        return dict(zip(names, shares.sum(1).unbind(), strict=True))

    @property
    def values(self) -> dict[str, float]:
        """The terms of the last `man()` or `man.terms()` as numbers; empty before one, and under torch.func."""
        names, shares = self._report
        return {} if shares is None else dict(zip(names, shares.sum(1).tolist(), strict=True))

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._done = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles of a model with its hooks: everything but the state of a forward pass."""
        return {**self.__dict__, "_running": None, "_done": None, "_report": ((), None)}

    def _take(self, weight: Tensor | None) -> tuple[tuple[str, ...], Tensor]:
        """The names of the layers and each sample's share in their terms [L, B]. Forgets the pass."""
        done, self._done = self._done, None
        if done is None:
            raise UserError("ActivationNorm: no forward pass to measure; call the model before each man()")
        if not done.taps:
            raise UserError("ActivationNorm: the model has no activation to measure; use output=True or layers=[...]")
        samples = []
        for name, tapped in done.taps.items():
            s = tapped if isinstance(tapped, Tensor) else tapped(weight)
            if weight is not None:
                s = _by_sample(s, weight.shape)
                if s.shape != weight.shape:
                    raise _misfit(name, weight, len(s))
            samples.append(s)
        if weight is not None:
            shares = torch.stack(samples) * (weight * weight.shape[0]).to(samples[0].dtype)
        elif len({s.shape for s in samples}) == 1:
            shares = torch.stack(samples)
        else:
            shares = torch.stack([s.sum(0, keepdim=True) for s in samples])
        names = tuple(done.taps)
        self._report = (names, None if transforms_active() else shares.detach())
        return names, shares

    def _enter(self, model: nn.Module, args: Any) -> None:
        _refuse_replica(model)
        if _recomputing():
            return
        if self._running is not None:
            if sum(frame.f_locals["self"] is model for frame in _frames(nn.Module._call_impl.__code__)) > 1:
                self._running.depth += 1
                return
            if self._functional is not None:  # its mode may be active still: KeyboardInterrupt calls no hooks
                if torch.overrides._get_current_function_mode() is self._functional:
                    self._functional.__exit__(None, None, None)
                self._functional = _FunctionalTaps(self)
        self._done, self._running = None, _Pass(torch.is_grad_enabled())
        if self._functional is not None:
            self._functional.__enter__()

    def _leave(self, model: nn.Module, args: Any, out: Any) -> Any:
        if _recomputing():
            recomputed = self._output and out is not None
            return _Pass(True).tap("", out, measure=self._measure, module=model) if recomputed else None
        current = self._running
        if current is None:
            return None
        current.depth -= 1
        if current.depth:
            return None
        self._running = None
        if self._functional is not None:
            self._functional.__exit__(None, None, None)
        if out is None:  # the forward pass has failed
            return None
        found = len(current.taps) > 0 or self._functional is None
        if self._output:
            out = current.tap("", out, measure=self._measure, module=model)
            if current.grad and not found:  # a pass without gradients only reports
                self._warn(model)
        current.finish()
        self._done = current
        return out

    def _warn(self, model: nn.Module) -> None:
        """Say once that nothing was found to measure but the output."""
        if self._warned or isinstance(model, RECURRENT) or torch.compiler.is_compiling():
            return
        self._warned = True
        children = ", ".join(repr(name) for name, _ in model.named_children())
        warnings.warn(
            f"MAN: found no activation in {type(model).__name__}, only its output counts; "
            f"name layers with ActivationNorm(model, [...])" + (f", out of {children}" if children else ""),
            UserWarning,
            stacklevel=2,
        )

    def _mute(self, module: nn.Module, args: Any) -> None:
        """Do not count the functional calls inside an activation module."""
        if self._running is not None and not _recomputing():
            self._running.muted += 1

    def _tap_module(self, name: str, measure: Measure | None, module: nn.Module, args: Any, out: Any) -> Any:
        _refuse_replica(module)
        z = args[0] if args else None
        if _recomputing():  # checkpointing expects the tensors that the first run saved for the backward pass
            return _Pass(True).tap(name, out, z, measure, module=module)
        if self._running is None:
            return None
        if self._functional is not None:
            self._running.muted -= 1
        with torch._C.DisableTorchFunction():  # the tap's own calls need not go through the mode: 30 µs a layer
            return self._running.tap(name, out, z, measure, module=module)


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call changes its first argument."""
    name: str = getattr(func, "__name__", "")
    if name == "__setitem__" or (name.endswith("_") and not name.startswith("__")):
        return True
    place = _inplace(func)
    return place is not None and bool(args[place] if place < len(args) else kwargs.get("inplace"))


@cache
def _inplace(func: Any) -> int | None:
    """Which argument of a function is `inplace`."""
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):  # PyTorch's own, whose names say it
        return None
    return names.index("inplace") if "inplace" in names else None


def _on_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Change a measured activation in place, on a copy that takes its place."""
    changed = args[0].clone()
    out = func(changed, *args[1:], **kwargs)
    set_value(args[0], changed)
    return args[0] if out is changed else out


def _choose(model: nn.Module, layers: Layers) -> dict[str, tuple[nn.Module, Measure | None]]:
    """The modules to tap by name, with their measures (None: the mean of squares)."""
    modules = {name: module for name, module in model.named_modules() if name}
    if layers is None:
        found = (*ACTIVATION_MODULES, *RECURRENT)
        return {name: (module, None) for name, module in modules.items() if isinstance(module, found)}
    names = [layers] if isinstance(layers, str) else list(layers)
    measures = dict(layers) if isinstance(layers, Mapping) else {}
    for name in names:
        if name not in modules:
            raise UserError(f"layers: the model has no module {name!r}{nearest(str(name), modules)}")
        if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
            raise UserError(f"layers: {name!r} is a list of modules and never called itself; name its members")
        if name in measures and not callable(measures[name]):
            raise UserError(f"layers: the measure of {name!r} is {measures[name]!r}, not a function of an activation")
    return {name: (modules[name], measures.get(name)) for name in names}


def _measured(
    name: str, out: Any, z: Any, measure: Measure | None, module: nn.Module | None
) -> tuple[Any, Tensor | OfBatch]:
    """An activation to pass on, and each sample's share in its term [B], or a function of weights [B] to it."""
    if _is_packed(out):
        data, s = _measured(name, out.data, None, measure, None)
        return out._replace(data=data), by_samples(out, s) if isinstance(s, Tensor) else s
    if samples_first(module, out):
        if measure is None:
            return tap(out, z)
        found = measure(out)
        if isinstance(found, Tensor):
            return out, _shares(name, out, found)
        return out, lambda weight: _shares(name, out, found(_by_row(name, weight, len(out))))
    a, s = _measured(name, out.transpose(0, 1), None, measure, None)
    return a.transpose(0, 1), s


def _shares(name: str, out: Tensor, s: Tensor) -> Tensor:
    """The values of a measure as shares in its mean."""
    if s.shape != out.shape[:1]:
        shapes = f"{tuple(out.shape)} to {tuple(s.shape)}, not to {tuple(out.shape[:1])}"
        raise UserError(f"layers: the measure of {name!r} maps an activation {shapes}")
    return s / s.numel()


def _is_packed(out: Any) -> bool:
    return isinstance(out, PackedSequence)


def _by_sample(s: Tensor, shape: torch.Size) -> Tensor:
    """Shares [rows] of an activation as those of samples [B], which have as many rows each, one after the other."""
    folded = len(shape) == 1 and len(s) > shape[0] and len(s) % shape[0] == 0
    return s.unflatten(0, (shape[0], -1)).sum(1) if folded else s


def _by_row(name: str, weight: Tensor | None, rows: int) -> Tensor | None:
    """Weights of samples [B] as those of the rows of an activation, of which each sample has as many, one after the
    other."""
    if weight is None or weight.shape == (rows,):
        return weight
    if weight.ndim != 1 or rows % len(weight):
        raise _misfit(name, weight, rows)
    share = rows // len(weight)
    return weight.repeat_interleave(share) / share


def _misfit(name: str, weight: Tensor, rows: int) -> UserError:
    return UserError(f"weight: shape {tuple(weight.shape)} does not fit layer {name!r} with {rows} samples")


def _added(total: Tensor, s: Tensor) -> Tensor:
    """Two steps of a cell; steps with different numbers of samples are added as sums over them."""
    return total + s if total.shape == s.shape else total.sum(0, keepdim=True) + s.sum(0, keepdim=True)


def _position(name: str, leaves: list[Any]) -> int:
    """Which leaf of an output is the activation: the first floating-point tensor with samples, or the only tensor."""
    for i, leaf in enumerate(leaves):
        a = leaf.data if _is_packed(leaf) else leaf
        if isinstance(a, Tensor) and a.is_floating_point() and (a.ndim or len(leaves) == 1):
            return i
    kinds = ", ".join(str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves)
    where = f"the output of layer {name!r}" if name else "the model's output"
    raise UserError(
        f"ActivationNorm: {where} has no floating-point tensor of samples ({kinds or 'nothing'}); "
        + ("name other layers" if name else "use output=False")
    )


def _frames(code: CodeType) -> Iterator[FrameType]:
    """The active calls of a function in this thread."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back


def _recomputing() -> bool:
    """Whether this is a recomputation of gradient checkpointing, inside the backward pass."""
    return not torch.compiler.is_dynamo_compiling() and torch._C._current_graph_task_id() != -1


def _refuse_replica(module: nn.Module) -> None:
    if not torch.compiler.is_compiling() and "_is_replica" in vars(module):
        raise UserError("ActivationNorm: nn.DataParallel hides its replicas' activations; use DistributedDataParallel")
