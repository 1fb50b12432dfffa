"""A model's mean loss as a function of its weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedman.errors import UserError
from fedman.execution.device import matmul_precision
from fedman.flatness.data import Batches, Loss, call, require_mean
from fedman.flatness.operator import check_dtype, scalar, select
from fedman.models.parameters import copy_of


class LossAt:
    """L(w) = (1/n) Σ_i loss(model_w(x_i), y_i) for any weights w `[P]`; those of the model are `centre`.

    The model is copied and put in eval mode. `parameters` selects the weights that w holds, as for `Hessian`; the
    others stay as they are.

    >>> loss_at = LossAt(nn.Linear(2, 1, bias=False), nn.functional.mse_loss, (torch.ones(3, 2), torch.zeros(3, 1)))
    >>> loss_at(torch.tensor([1.0, 2.0]))
    9.0
    >>> loss_at.with_gradient(torch.tensor([1.0, 2.0]))
    (9.0, tensor([6., 6.]))
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Any,
        *,
        parameters: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
        batch_size: int | None = None,
        limit: int | None = None,
    ) -> None:
        self.loss, self.dtype = loss, check_dtype(dtype)
        self.layout = select(model, parameters)
        self.device = next(model.parameters()).device
        self.batches = Batches(batches, device=self.device, dtype=dtype, batch_size=batch_size, limit=limit)
        self.model = copy_of(model).to(dtype).eval().requires_grad_(False)
        with matmul_precision("fp32"):
            require_mean(self.model, loss, self.batches)
        self.centre = self.layout.flatten(dict(self.model.named_parameters()))

    @property
    def samples(self) -> int:
        """n."""
        return self.batches.samples

    @torch.no_grad()
    def __call__(self, w: Tensor) -> float:
        """L(w), the batches summed in float64."""
        return float(sum(share * part.double() for share, part in self._parts(w)))

    def at_centre(self) -> float:
        """The loss of the model itself, which must be finite."""
        value = self(self.centre)
        if not math.isfinite(value):
            raise UserError(f"loss: {value} at the model itself, a finite number is needed; check the model")
        return value

    def with_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """L(w) and ∇L(w) `[P]`."""
        w = w.detach().requires_grad_()
        total, gradient = torch.zeros((), dtype=torch.float64, device=self.device), torch.zeros_like(w)
        with torch.enable_grad():
            for share, part in self._parts(w):
                total += share * part.detach()
                if part.requires_grad:
                    gradient.add_(torch.autograd.grad(part, w)[0], alpha=share)
        return float(total), gradient

    def batch_by_batch(self) -> Iterator[tuple[float, LossAt]]:
        """Each batch's share of all samples, and the loss on that batch alone."""
        for share, x, y in self.batches:
            part = copy.copy(self)
            part.batches = Batches([(x, y)], device=self.device, dtype=self.dtype)
            yield share, part

    def _parts(self, w: Tensor) -> Iterator[tuple[float, Tensor]]:
        """Each batch's share and loss."""
        weights = self.layout.unflatten(w)
        for share, x, y in self.batches:
            with matmul_precision("fp32"):
                output = call(lambda *args, **named: functional_call(self.model, weights, args, named), x)
                yield share, scalar(self.loss(output, y))
