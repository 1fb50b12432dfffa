"""One nn.Module and a matrix of weights `[S, P]`: the losses and gradients of S models at once.

This is the only place that knows how a stack of models is evaluated. A model's P numbers are its parameters in the
order of `model.parameters()`, flattened and joined; `W.split(sizes, -1)` gives the layers back, and the backward
pass of that is one concatenation. Row i of the losses depends on row i of W alone, so one backward pass of their
sum gives every row's own gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedman.errors import UserError
from fedman.models.convnet import ConvNet
from fedman.penalties.man import ActivationNorm, Measure, mean_square, mean_square_and_variance
from fedman.training.batches import Layout

if TYPE_CHECKING:
    from fedman.kernels.convnet import StackedConvNet


class Stacked:
    """A model as a function of flat weights. Not safe to share between threads: take a `copy` for each."""

    def __init__(self, model: nn.Module, *, output: bool = True, layers: Mapping[str, Measure] | None = None) -> None:
        check(model)
        self._arguments = model, output, layers
        self.plain = copy.deepcopy(model).requires_grad_(False)
        self.tapped = copy.deepcopy(model).requires_grad_(False)
        self.man = ActivationNorm(self.tapped, layers, output=output)
        self.layers: list[str] = []  # names of the MAN terms, known after the first forward pass
        self.precision = "fp32"
        self.kernels: StackedConvNet | None = None
        parameters = dict(model.named_parameters())
        self.names = list(parameters)
        self.shapes = [p.shape for p in parameters.values()]
        self.sizes = [p.numel() for p in parameters.values()]

    def accelerate(self, device: torch.device, precision: str, shape: tuple[int, ...]) -> None:
        """Use the stacked GPU kernels for the losses where they serve this model, its taps and this device."""
        from fedman import kernels

        model, output, layers = self._arguments
        self.precision = precision
        if precision == "fp64" or not isinstance(model, ConvNet) or not kernels.available(device):
            return
        from fedman.kernels.convnet import StackedConvNet

        names = [f"relus.{i}" for i in range(len(model.relus))]
        measures = dict.fromkeys(names, mean_square) if layers is None else dict(layers)
        known = set(measures) <= set(names) and set(measures.values()) <= {mean_square, mean_square_and_variance}
        varied = [names.index(name) for name, measure in measures.items() if measure is mean_square_and_variance]
        if not known or not StackedConvNet.supports(model, shape, varied):
            return
        self.kernels = StackedConvNet(model, shape, precision, varied)
        chosen = [*(name in measures for name in names), output]
        self.layers = list(compress([*names, "output"], chosen))
        self._measured = torch.tensor(chosen, device=device)
        self._places = self._measured.nonzero()[:, 0]

    @property
    def layout(self) -> Layout | None:
        """How the kernels want their images, where they are used; `losses` and `gradient` then take those."""
        return (self.kernels.padding, self.kernels.dtype) if self.kernels is not None else None

    def scores(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """`[2]` in float64: correct answers and summed cross-entropy of one model `[P]` on a batch."""
        if self.kernels is not None:
            rows = -(-len(y) // 500)  # the model once for every 500 images: the kernels want several clients
            if len(y) % rows:
                return sum(self.scores(w, *part) for part in zip(x.split(500), y.split(500), strict=True))  # type: ignore[return-value]
            out = self.kernels.logits(w.expand(rows, -1), x.unflatten(0, (rows, -1))).flatten(0, 1)
        else:
            out = self.logits(w, x)
        ce = F.cross_entropy(out, y, reduction="sum")
        return torch.stack([(out.argmax(-1) == y).sum().double(), ce.double()])

    def copy(self) -> Stacked:
        """The same model with hooks and buffers of its own, for use in another thread."""
        model, output, layers = self._arguments
        twin = Stacked(model, output=output, layers=layers)
        twin.precision = self.precision
        return twin

    @property
    def size(self) -> int:
        """P, the number of parameters."""
        return sum(self.sizes)

    @property
    def large(self) -> bool:
        """Whether its arithmetic counts, and not the cost of its calls."""
        return self.size > 50_000

    def is_weight(self) -> Tensor:
        """`[P]`: True for the entries of tensors whose name contains "weight"."""
        return torch.cat([torch.full((n,), "weight" in name) for name, n in zip(self.names, self.sizes, strict=True)])

    def initial(self) -> Tensor:
        """The module's own weights as a vector `[P]`."""
        return flatten(self._arguments[0])

    def parameters(self, w: Tensor) -> dict[str, Tensor]:
        """`[..., P]` seen as named parameters `[..., *shape]`."""
        parts = w.split(self.sizes, dim=-1)
        return {
            name: part.unflatten(-1, shape) if len(shape) else part.squeeze(-1)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        """The outputs of one model `[P]` on a batch."""
        with self.autocast(x.device):
            return functional_call(self.plain, self.parameters(w), (x,)).to(w.dtype)

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """bf16 products around the module, where that is asked for."""
        return torch.autocast(device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def images(self, x: Tensor) -> Any:
        """A batch as `losses` and `gradient` take it, too, without doing again what does not depend on the weights."""
        return x if self.kernels is None else self.kernels.images(x)

    def losses(self, W: Tensor, x: Any, y: Tensor, weight: Tensor | None, man: bool) -> tuple[Tensor, Tensor]:
        """Cross-entropy `[S]` and the layers' MAN terms `[S, L]` of S models on their batches `[S, B, ...]`.

        `weight` `[S, B]` is each sample's share in its batch's mean; None: equal shares. Without `man` the terms
        are not evaluated and L = 0.
        """
        if self.kernels is not None:
            ce, terms = self.kernels.losses(W, x, y, weight)
            return ce, terms.index_select(1, self._places) if man else terms[:, :0]
        if len(W) == 1:  # the plain module: on a CPU, grouped and vmapped convolutions are slower than one by one
            ce, terms = self._loss(W[0], x[0], y[0], None if weight is None else weight[0], man)
            return ce[None], terms[None]
        stack = vmap(self._loss, in_dims=(0, 0, 0, None if weight is None else 0, None))
        return stack(W, x, y, weight, man)

    def _loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor | None, man: bool) -> tuple[Tensor, Tensor]:
        with self.autocast(x.device):
            out = functional_call(self.tapped if man else self.plain, self.parameters(w), (x,)).to(w.dtype)
        ce = F.cross_entropy(out, y) if weight is None else (F.cross_entropy(out, y, reduction="none") * weight).sum()
        if not man:
            return ce, ce.new_empty(0)
        terms = self.man.terms(weight)
        self.layers = list(terms)
        return ce, torch.stack(list(terms.values())).to(ce.dtype)

    def gradient(
        self, W: Tensor, x: Any, y: Tensor, weight: Tensor | None, zeta: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """The gradient `[S, P]` of cross-entropy + ζ·MAN, and the cross-entropy `[S]`."""
        if self.kernels is not None:
            zetas = (zeta[:, None] if isinstance(zeta, Tensor) else zeta) * self._measured
            ce, _, gradient = self.kernels.gradient(W, x, y, zetas, weight)
            return gradient, ce
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


def flatten(model: nn.Module) -> Tensor:
    """A module's parameters as a vector `[P]`."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def check(model: nn.Module) -> None:
    """Refuse what cannot be averaged or stacked: batch statistics, dropout, a model without parameters."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model: {type(model).__name__} has no parameters to train")
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(f"model: {name} is a {kind}, whose batch statistics are not a client's own; use GroupNorm")
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UserError(f"model: {name} is a {kind} with p={module.p}, which makes runs irreproducible; use p=0")
