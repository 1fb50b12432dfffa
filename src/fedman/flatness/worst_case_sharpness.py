"""Sharpness in the worst case: how much the worst perturbation of the weights raises the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedman.flatness.ascent import Ascent
from fedman.flatness.data import Loss
from fedman.flatness.loss_at import LossAt


@dataclass(frozen=True)
class WorstCaseSharpness:
    """L(w + δ) − L(w) at the worst δ `[P]` that was found."""

    value: float
    delta: Tensor
    samples: int


def worst_case_sharpness(
    model: nn.Module, loss: Loss, batches: Any, ascent: Ascent, **options: Any
) -> WorstCaseSharpness:
    """S_max(ρ) = max L(w + δ) − L(w) over ‖δ/c‖_p ≤ ρ for the mean loss L of all samples, as `ascent` searches it.

    To second order at a stationary point and for p = 2 it is ½ρ² λ_max(CHC), C = diag(c). `options` are those of
    `LossAt`.

    >>> import torch
    >>> model, data = nn.Linear(2, 1, bias=False), (torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1))
    >>> _ = nn.init.zeros_(model.weight)
    >>> found = worst_case_sharpness(model, nn.functional.mse_loss, data, Ascent(rho=0.1, adaptive=False))
    >>> round(found.value, 6)  # ρ²‖x‖²
    0.25
    """
    loss_at = LossAt(model, loss, batches, **options)
    return WorstCaseSharpness(*ascent(loss_at), loss_at.samples)
