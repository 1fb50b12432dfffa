"""The contract of an execution: how S models of one architecture are evaluated at once on one device.

Row i of the losses depends on row i of the weights `[S, P]` alone, so one backward pass of their sum gives every row's
own gradient.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedman.algorithms import Fused
from fedman.errors import UserError
from fedman.models.parameters import ParameterLayout
from fedman.penalties import Penalty, attach, check_terms
from fedman.tasks import Task

ImageLayout = tuple[int, torch.dtype]
"""How an execution wants its images where it reads them from the stored bytes: zero padding in pixels, and type."""


class Batch(NamedTuple):
    """What S models are evaluated on in a step, a row for each."""

    x: Any  # inputs [S, B, ...], in the form that `Execution.prepare` gives them
    y: Tensor  # targets [S, B, ...]
    weight: Tensor | None = None  # [S, B]: each sample's share in its batch's mean, 0 for padding; None: equal shares

    def row(self, i: int) -> Batch:
        """What model i is evaluated on, without the dimension of models."""
        return Batch._make(None if v is None else v[i] for v in self)


class Execution(ABC):
    """A model, its task and its penalty as functions of flat weights. Not safe to share between threads: take a `copy`
    for each."""

    title: str  # what a summary calls it
    stacks: ClassVar[bool] = True  # whether on a CPU clients together cost less than one after the other
    image_layout: ImageLayout | None = None
    fused: Fused | None = None  # kernels for the steps of an algorithm

    def __init__(self, model: nn.Module, task: Task, penalty: Penalty, precision: str = "fp32") -> None:
        check_model(model)
        self.model, self.task, self.penalty, self.precision = model, task, penalty, precision
        self.parameters = ParameterLayout.of(model)
        self._plain = copy.deepcopy(model).requires_grad_(False)
        self._tapped = copy.deepcopy(model).requires_grad_(False)
        self._terms = attach(penalty, self._tapped)
        self.terms: list[str] = []  # names of the penalty's terms, known after the first forward pass
        self.scored: list[str] = []  # names of the task's scores, known after the first evaluation

    def copy(self) -> Execution:
        """The same model with hooks and buffers of its own, for use in another thread."""
        return type(self)(self.model, self.task, self.penalty, self.precision)

    @abstractmethod
    def losses(self, W: Tensor, batch: Batch, penalised: bool) -> tuple[Tensor, Tensor]:
        """The loss `[S]` and the penalty's terms `[S, L]` of S models on their batches.

        Unless `penalised`, the terms are not evaluated and L = 0.
        """

    def prepare(self, x: Tensor) -> Any:
        """Inputs in the form that `losses` and `gradient` take: what does not depend on the weights, done once."""
        return x

    def prepare_test(self, x: Tensor) -> Tensor:
        """The samples of a test set in the form that `scores` takes."""
        return x

    def gradient(self, W: Tensor, batch: Batch, zeta: Tensor | float) -> tuple[Tensor, Tensor]:
        """The gradient `[S, P]` of loss + ζ·Σ terms, and the loss `[S]`."""
        penalised = isinstance(zeta, Tensor) or zeta > 0
        W = W.detach().requires_grad_()
        loss, terms = self.losses(W, batch, penalised)
        objective = loss + zeta * terms.sum(-1) if penalised else loss
        (gradient,) = torch.autograd.grad(objective.sum(), W)
        return gradient, loss.detach()

    @torch.no_grad()
    def penalty_terms(self, W: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The terms `[S]` of the penalty by name, for the records."""
        _, terms = self.losses(W, batch, penalised=True)
        return dict(zip(self.terms, terms.unbind(-1), strict=True))

    @torch.no_grad()
    def scores(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """`[B, 2 + K]` in float64: of one model `[P]` on a batch the weight of each sample, and times that weight its
        loss and its K scores."""
        out = self.outputs(w, x)
        scores = self.task.scores(out, y)
        self.scored = list(scores)
        figures = torch.stack([self.task.loss(out, y).double(), *(v.double() for v in scores.values())], 1)
        weight = self.task.weight(y)
        share = figures.new_ones(len(figures), 1) if weight is None else weight.double()[:, None]
        return torch.cat([share, share * figures], 1)

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """The outputs of one model `[P]` on a batch."""
        return self._call(self._plain, w, x)

    def _call(self, model: nn.Module, w: Tensor, x: Tensor) -> Tensor:
        with self._autocast(x.device):
            return functional_call(model, self.parameters.unflatten(w), (x,)).to(w.dtype)

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """bf16 products around the module, where that is asked for."""
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def _loss(self, w: Tensor, batch: Batch, penalised: bool) -> tuple[Tensor, Tensor]:
        """The loss and the terms `[L]` of one model `[P]` on a row of a batch."""
        x, y, weight = batch
        out = self._call(self._tapped if penalised else self._plain, w, x)
        loss = self.task.mean_loss(out, y) if weight is None else (self.task.loss(out, y) * weight).sum()
        if not penalised:
            return loss, loss.new_empty(0)
        terms = check_terms(self.penalty, self._terms.terms(weight))
        self.terms = list(terms)
        return loss, torch.stack(list(terms.values())).to(loss.dtype)


def is_large(size: int) -> bool:
    """Whether a model of `size` parameters is bound by its arithmetic, and not by the cost of its calls."""
    return size > 50_000


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be averaged or stacked: batch statistics, dropout, a model without parameters."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model: {type(model).__name__} has no parameters to train")
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(f"model: {name} is a {kind}, whose batch statistics are not a client's own; use GroupNorm")
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UserError(f"model: {name} is a {kind} with p={module.p}, which makes runs irreproducible; use p=0")
