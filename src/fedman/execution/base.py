"""The contract of an execution: how S models of one architecture are evaluated at once on one device.

Row i of the losses depends on row i of the weights `[S, P]` alone, so one backward pass of their sum gives every row's
own gradient.

Models train in PyTorch's training mode, with the dropout and the batch statistics that `training_pass` says, and are
evaluated in its evaluation mode.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedman.algorithms import Fused
from fedman.errors import UserError
from fedman.execution.training_pass import TrainingPass
from fedman.models.parameters import ParameterLayout, flatten_buffers
from fedman.penalties import Penalty, attach, check_terms
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
        self._plain = copy.deepcopy(model).requires_grad_(False).train()
        self._tapped = copy.deepcopy(model).requires_grad_(False).train()
        self._evaluated = _for_evaluation(copy.deepcopy(model).requires_grad_(False))
        self._terms = attach(penalty, self._tapped)
        self._tied = _has_tied(model)  # if not, PyTorch need not look for it at every call
        self._device = torch.device("cpu")
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
        loss, terms, buffers = self.losses(W, batch, penalised)
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
        """One model `[P + Q]` as `module.load_state_dict` takes it, on the host."""
        kept, own = self.model.state_dict(), dict(self.model.named_buffers())
        found = self._named(w.cpu())
        for name, v in own.items():
            if name in found and not v.is_floating_point():
                found[name] = found[name].round().to(v.dtype)
            elif name in kept:
                found.setdefault(name, v.detach().cpu())
        return {name: v.clone() for name, v in found.items()}

    def _named(self, w: Tensor) -> dict[str, Tensor]:
        """The parameters and buffers of one model `[P + Q]`."""
        size = self.parameters.size
        buffers = self.buffers.unflatten(w[size:]) if self.buffers.names else {}
        return self.parameters.unflatten(w[:size]) | buffers

    def _call(self, model: nn.Module, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """The output of the module with these parameters and buffers; `tensors` then has what it left in the latter."""
        dtype = next(iter(tensors.values())).dtype
        if self._device != x.device:
            self._bring_constants(x.device)
        with self._autocast(x.device):
            return functional_call(model, tensors, (x,), tie_weights=self._tied).to(dtype)

    def _bring_constants(self, device: torch.device) -> None:
        """Move the buffers that are no part of `buffers` to where the models are evaluated."""
        for copied in (self._plain, self._tapped, self._evaluated):
            for module in copied.modules():
                for name, v in module.named_buffers(recurse=False):
                    setattr(module, name, v.to(device))
        self._device = device

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
        if self._special is False:
            out = self._call(model, tensors, batch.x)
        else:
            with TrainingPass(batch.key, batch.weight) as forward:
                out = self._call(model, tensors, batch.x)
            self._special = forward.needed
        y, weight = batch.y, batch.weight
        loss = self.task.mean_loss(out, y) if weight is None else (self.task.loss(out, y) * weight).sum()
        buffers = self.buffers.flatten(tensors).detach() if self.buffers.names else loss.new_empty(0)
        if not penalised:
            return loss, loss.new_empty(0), buffers
        terms = check_terms(self.penalty, self._terms.terms(weight))
        self.terms = list(terms)
        return loss, torch.stack(list(terms.values())).to(loss.dtype), buffers


def is_large(size: int) -> bool:
    """Whether a model of `size` parameters is bound by its arithmetic, and not by the cost of its calls."""
    return size > 50_000


def check_model(model: nn.Module) -> None:
    """Refuse a model without parameters."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model: {type(model).__name__} has no parameters to train")


def _has_tied(model: nn.Module) -> bool:
    """Whether a parameter or a buffer of the module has several names."""
    return any(
        len(list(named(remove_duplicate=False))) > len(list(named()))
        for named in (model.named_parameters, model.named_buffers)
    )


def _for_evaluation(model: nn.Module) -> nn.Module:
    """`model` in evaluation mode. Attention keeps the products of training: the fused ones round differently."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            module.training = True
    return model
