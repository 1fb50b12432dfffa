"""The contract of an execution: how S models of one architecture are evaluated at once on one device.

Row i of the losses depends on row i of the weights `[S, P]` alone, so one backward pass of their sum gives every row's
own gradient.

Models train in PyTorch's training mode, with the dropout and the batch statistics that `training_pass` says, and are
evaluated in its evaluation mode.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedman.algorithms import Fused
from fedman.errors import UserError
from fedman.execution.training_pass import TrainingPass
from fedman.models.parameters import ParameterLayout, copy_of, flatten_buffers, holding, other_names
from fedman.penalties import Penalty, attach, check_terms
from fedman.penalties.autograd import unwrapped
from fedman.tasks import Task

ImageLayout = tuple[int, torch.dtype]
"""How an execution wants its images where it reads them from the stored bytes: zero padding in pixels, and type."""


class Batch(NamedTuple):
    """What S models are evaluated on in a step, a row for each."""

    x: Any  # inputs [S, B, ...], in the form that `Execution.prepare` gives them
    y: Tensor  # targets [S, B, ...]
    weight: Tensor | None = None  # [S, B]: each sample's share in its batch's mean, 0 for padding; None: equal shares
    key: Tensor | None = None  # [S] int64, from which random numbers of the forward pass come; None: zero
    buffers: Tensor | None = None  # [S, Q], the models' buffers before the step; None: as the module has them

    def row(self, i: int) -> Batch:
        """What model i is evaluated on, without the dimension of models."""
        return Batch._make(None if v is None else v[i] for v in self)


def of_rows(rows: slice, W: Tensor, batch: Batch, zeta: Tensor | float) -> tuple[Tensor, Batch, Tensor | float]:
    """Some rows of everything that a gradient is computed from."""
    part = Batch._make(None if v is None else v[rows] for v in batch)
    return W[rows], part, zeta[rows] if isinstance(zeta, Tensor) else zeta


class Execution(ABC):
    """A model, its task and its penalty as functions of flat weights. Not safe to share between threads: take a `copy`
    for each."""

    title: str  # what a summary calls it
    stacks: ClassVar[bool] = True  # whether on a CPU clients together cost less than one after the other
    compiled = False  # whether the first steps wait for a compiler
    image_layout: ImageLayout | None = None
    fused: Fused | None = None  # kernels for the steps of an algorithm

    def __init__(self, model: nn.Module, task: Task, penalty: Penalty, precision: str = "fp32") -> None:
        check_model(model)
        self.model, self.task, self.penalty, self.precision = model, task, penalty, precision
        self.parameters, self.buffers = ParameterLayout.of(model), ParameterLayout.of_buffers(model)
        self._initial_buffers = flatten_buffers(model)
        shared = _shared_parameters(model)
        self._plain, self._tapped = copy_of(model, shared).train(), copy_of(model, shared).train()
        self._evaluated = _for_evaluation(copy_of(model, shared))
        self._terms = attach(penalty, self._tapped)
        self._others = other_names(model)
        self._constants: tuple[torch.device, torch.dtype] | None = None  # where and what those of the module are
        self._held: ExitStack | None = None  # until the end of which the module keeps the parameters of a call
        self._writes: dict[nn.Module, bool] = {}  # whether a copy changes its inputs, known after its first call
        self._special: bool | None = None  # whether training needs a `TrainingPass`, known after the first one
        self.terms: list[str] = []  # names of the penalty's terms, known after the first forward pass
        self.scored: list[str] = []  # names of the task's scores, known after the first evaluation

    @property
    def parts(self) -> tuple[nn.Module, Task, Penalty, str]:
        """What an execution is made of."""
        return self.model, self.task, self.penalty, self.precision

    def copy(self) -> Execution:
        """The same model with hooks and buffers of its own, for use in another thread."""
        return type(self)(*self.parts)

    def rehearse(self, work: Callable[[], object]) -> None:  # noqa: B027
        """Get ready for what `work` does. Where that helps, it is called without its results being computed."""

    @abstractmethod
    def losses(self, W: Tensor, batch: Batch, penalised: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The loss `[S]` and the penalty's terms `[S, L]` of S models on their batches, in training mode, and their
        buffers `[S, Q]` after it.

        Unless `penalised`, the terms are not evaluated and L = 0.
        """

    def prepare(self, x: Tensor) -> Any:
        """Inputs in the form that `losses` and `gradient` take: what does not depend on the weights, done once."""
        return x

    def prepare_test(self, x: Tensor) -> Tensor:
        """The samples of a test set in the form that `scores` takes."""
        return x

    def gradient(self, W: Tensor, batch: Batch, zeta: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient `[S, P]` of loss + ζ·Σ terms, the loss `[S]`, and the buffers `[S, Q]` after it."""
        penalised = isinstance(zeta, Tensor) or zeta > 0
        W = W.detach().requires_grad_()
        with ExitStack() as until_then:  # checkpointing calls parts of the module again in the backward pass
            self._held = until_then if len(W) == 1 else None
            try:
                loss, terms, buffers = self.losses(W, batch, penalised)
            finally:
                self._held = None
            objective = loss + zeta * terms.sum(-1) if penalised else loss
            (gradient,) = torch.autograd.grad(objective.sum(), W)
        return gradient, loss.detach(), buffers

    @torch.no_grad()
    def penalty_terms(self, W: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The terms `[S]` of the penalty by name as training sees them, for the records."""
        _, terms, _ = self.losses(W, batch, penalised=True)
        return dict(zip(self.terms, terms.unbind(-1), strict=True))

    @torch.no_grad()
    def scores(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """`[B, 2 + K]` in float64: of one model `[P + Q]`, parameters and buffers, on a batch the weight of each
        sample, and times that weight its loss and its K scores."""
        out = self.outputs(w, x)
        scores = self.task.scores(out, y)
        self.scored = list(scores)
        figures = torch.stack([self.task.loss(out, y).double(), *(v.double() for v in scores.values())], 1)
        weight = self.task.weight(y)
        share = figures.new_ones(len(figures), 1) if weight is None else weight.double()[:, None]
        return torch.cat([share, share * figures], 1)

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """The outputs of one model `[P + Q]` on a batch, in evaluation mode."""
        return self._call(self._evaluated, self._named(w), x)

    def state_dict(self, w: Tensor) -> dict[str, Tensor]:
        """One model `[P + Q]` as `module.load_state_dict` takes it, on the host: constants and, under all their names,
        shared tensors included."""
        trained, kept = self._named(w.cpu()), self.model.state_dict()
        found: dict[str, Tensor] = {}
        first: dict[int, str] = {}  # names of tensors that may have several
        for name, v in _tensors(self.model):
            known = first.setdefault(id(v), name)
            value = trained.get(known, v.detach().cpu())
            whole = known in trained and not v.is_floating_point()
            if name in kept:  # files hold contiguous tensors alone
                value = value.round().to(v.dtype) if whole else value
                found[name] = value.clone(memory_format=torch.contiguous_format)
        return found

    def _named(self, w: Tensor) -> dict[str, Tensor]:
        """The parameters and buffers of one model `[P + Q]`."""
        size = self.parameters.size
        buffers = self.buffers.unflatten(w[size:]) if self.buffers.names else {}
        return self.parameters.unflatten(w[:size]) | buffers

    def _call(self, model: nn.Module, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """The output of the module with these parameters and buffers; `tensors` then has what it left in the latter."""
        dtype = next(iter(tensors.values())).dtype
        if self._constants != (x.device, dtype):
            self._bring_constants(x.device, dtype)
        given = x.clone() if self._writes.get(model, True) else x
        with ExitStack() as stack, self._autocast(x.device):
            (self._held or stack).enter_context(holding(model, tensors, self._others))
            out = model(given)
            if self.buffers.names:  # a module may have put new ones in their places
                tensors |= {name: v for name, v in model.named_buffers() if name in tensors}
        if model not in self._writes:
            self._writes[model] = unwrapped(given)._version > 0
        if not isinstance(out, Tensor):
            name, got = type(self.model).__name__, type(out).__name__
            raise UserError(f"model: {name} returns {got} in training mode; a tensor is wanted")
        return out.to(dtype)

    def _bring_constants(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the buffers that are no part of `buffers` and frozen parameters to where the models are evaluated, as
        numbers of the type in which they are."""
        trained = set(self.parameters.names)  # of which every call brings its own
        for copied in (self._plain, self._tapped, self._evaluated):
            frozen = [v for name, v in copied.named_parameters() if name not in trained]
            for v in (*frozen, *copied.buffers()):
                v.data = v.data.to(device, _as_precise(v.dtype, dtype))
        self._constants = device, dtype

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """bf16 products around the module, where that is asked for."""
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def _loss(self, w: Tensor, batch: Batch, penalised: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the terms `[L]` and the buffers `[Q]` of one model `[P]` on a row of a batch."""
        model = self._tapped if penalised else self._plain
        tensors = self.parameters.unflatten(w)
        if self.buffers.names:
            before = self._initial_buffers.to(w) if batch.buffers is None else batch.buffers
            tensors |= {name: v.clone() for name, v in self.buffers.unflatten(before).items()}
        plain: AbstractContextManager[None] = nullcontext()
        with plain if self._special is False else TrainingPass(batch.key, batch.weight) as forward:
            out = self._call(model, tensors, batch.x)
        y, weight = batch.y, batch.weight
        loss = self.task.mean_loss(out, y) if weight is None else (self.task.loss(out, y) * weight).sum()
        buffers = self.buffers.flatten(tensors).detach() if self.buffers.names else loss.new_empty(0)
        terms = check_terms(self.penalty, self._terms.terms(weight)) if penalised else {}
        self.terms = list(terms) or self.terms
        if forward is not None:
            self._special = forward.needed
            if forward.repeated and self._held is not None:
                self._held.enter_context(forward)
        return loss, torch.stack(list(terms.values())).to(loss.dtype) if terms else loss.new_empty(0), buffers


def is_large(size: int) -> bool:
    """Whether a model of `size` parameters is bound by its arithmetic, and not by the cost of its calls."""
    return size > 50_000


def check_model(model: nn.Module) -> None:
    """Refuse a model whose parameters cannot be a vector that is put into it."""
    name = type(model).__name__
    if isinstance(model, nn.DataParallel):
        raise UserError(f"model: {name} spreads batches over GPUs; give the module in it, model.module")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UserError(f"model: {name} is or has a TorchScript module; give the nn.Module that it was made from")
    for parameter, p in model.named_parameters():
        if is_lazy(p):
            raise UserError(f"model: {parameter} has no shape yet; call {name} on a batch first, as lazy modules want")
        if p.requires_grad and p.is_complex():
            raise UserError(f"model: {parameter} is complex; keep its two parts and join them by torch.complex")
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise UserError(f"model: {parameter} has a hook on its gradient, which no client would call; remove it")
    stored = model.state_dict()
    if sparse := [n for n, v in _tensors(model) if n in stored and v.layout is not torch.strided]:
        raise UserError(
            f"model: {sparse[0]} is sparse, which model.safetensors cannot hold; register it with persistent=False"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model: {name} has no parameters to train")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module, those with several names under each of them."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _as_precise(dtype: torch.dtype, like: torch.dtype) -> torch.dtype:
    """The type of a constant beside numbers of the type `like`."""
    return like.to_complex() if dtype.is_complex else like if dtype.is_floating_point else dtype


def _shared_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """The parameters of all copies of a model, by what they take the place of. Of trained ones, of which every call
    brings its own, the memory is the model's; frozen ones are copied once."""
    found: dict[int, nn.Parameter] = {}
    for p in model.parameters():
        kind = type(p) is nn.Parameter
        own = p.detach() if p.requires_grad else p.detach().clone() if kind else copy.deepcopy(p)
        found[id(p)] = own if isinstance(own, nn.Parameter) else nn.Parameter(own, requires_grad=False)
    return found


def _for_evaluation(model: nn.Module) -> nn.Module:
    """`model` in evaluation mode. Attention keeps the products of training: the fused ones round differently."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            module.training = True
    return model
