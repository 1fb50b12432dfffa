"""The contract of an execution: how S models of one architecture are evaluated at once on one device.

Row i of the losses depends on row i of the weights `[S, P]` alone, so one backward pass of their sum gives every row's
own gradient.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedman.algorithms import Fused
from fedman.errors import UserError
from fedman.models.parameters import ParameterLayout
from fedman.penalties.man import ActivationNorm, Measure

ImageLayout = tuple[int, torch.dtype]
"""How an execution wants its images where it reads them from the stored bytes: zero padding in pixels, and type."""


class Execution(ABC):
    """A model as a function of flat weights. Not safe to share between threads: take a `copy` for each.

    `output` and `layers` say which activations MAN measures, as in `ActivationNorm`.
    """

    image_layout: ImageLayout | None = None
    fused: Fused | None = None  # kernels for the steps of an algorithm

    def __init__(
        self,
        model: nn.Module,
        *,
        output: bool = True,
        layers: Mapping[str, Measure] | None = None,
        precision: str = "fp32",
    ) -> None:
        check_model(model)
        self._arguments = {"output": output, "layers": layers, "precision": precision}
        self.model, self.precision = model, precision
        self.parameters = ParameterLayout.of(model)
        self._plain = copy.deepcopy(model).requires_grad_(False)
        self._tapped = copy.deepcopy(model).requires_grad_(False)
        self._man = ActivationNorm(self._tapped, layers, output=output)
        self.layers: list[str] = []  # names of the MAN terms, known after the first forward pass

    def copy(self) -> Execution:
        """The same model with hooks and buffers of its own, for use in another thread."""
        return type(self)(self.model, **self._arguments)  # type: ignore[arg-type]

    @abstractmethod
    def losses(self, W: Tensor, x: Any, y: Tensor, weight: Tensor | None, man: bool) -> tuple[Tensor, Tensor]:
        """Cross-entropy `[S]` and the layers' MAN terms `[S, L]` of S models on their batches `[S, B, ...]`.

        `weight` `[S, B]` is each sample's share in its batch's mean; None: equal shares. Without `man` the terms
        are not evaluated and L = 0.
        """

    def prepare(self, x: Tensor) -> Any:
        """A batch in the form that `losses` and `gradient` take: what does not depend on the weights, done once."""
        return x

    def prepare_test(self, x: Tensor) -> Tensor:
        """The samples of a test set in the form that `scores` takes."""
        return x

    def gradient(
        self, W: Tensor, x: Any, y: Tensor, weight: Tensor | None, zeta: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """The gradient `[S, P]` of cross-entropy + ζ·MAN, and the cross-entropy `[S]`."""
        man = isinstance(zeta, Tensor) or zeta > 0
        W = W.detach().requires_grad_()
        ce, terms = self.losses(W, x, y, weight, man)
        objective = ce + zeta * terms.sum(-1) if man else ce
        (gradient,) = torch.autograd.grad(objective.sum(), W)
        return gradient, ce.detach()

    @torch.no_grad()
    def man_terms(self, W: Tensor, x: Tensor, y: Tensor, weight: Tensor | None) -> dict[str, Tensor]:
        """The MAN terms `[S]` by layer, for the records."""
        _, terms = self.losses(W, x, y, weight, man=True)
        return dict(zip(self.layers, terms.unbind(-1), strict=True))

    @torch.no_grad()
    def scores(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """`[2]` in float64: correct answers and summed cross-entropy of one model `[P]` on a batch."""
        out = self.outputs(w, x)
        ce = F.cross_entropy(out, y, reduction="sum")
        return torch.stack([(out.argmax(-1) == y).sum().double(), ce.double()])

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """The outputs of one model `[P]` on a batch."""
        return self._call(self._plain, w, x)

    def _call(self, model: nn.Module, w: Tensor, x: Tensor) -> Tensor:
        with self._autocast(x.device):
            return functional_call(model, self.parameters.unflatten(w), (x,)).to(w.dtype)

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """bf16 products around the module, where that is asked for."""
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def _loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor | None, man: bool) -> tuple[Tensor, Tensor]:
        """The losses of one model `[P]`."""
        out = self._call(self._tapped if man else self._plain, w, x)
        ce = F.cross_entropy(out, y) if weight is None else (F.cross_entropy(out, y, reduction="none") * weight).sum()
        if not man:
            return ce, ce.new_empty(0)
        terms = self._man.terms(weight)
        self.layers = list(terms)
        return ce, torch.stack(list(terms.values())).to(ce.dtype)


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
