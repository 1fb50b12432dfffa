"""Sharpness on average: how much random perturbations of the weights raise the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedman.errors import UserError
from fedman.flatness.data import Loss
from fedman.flatness.loss_at import LossAt
from fedman.flatness.operator import Progress
from fedman.flatness.weight_scale import weight_scale


@dataclass(frozen=True)
class AverageSharpness:
    """S_avg(ρ) with its standard error over pairs of draws, and the loss L(w) that it is measured from."""

    value: float
    error: float
    loss: float
    rho: float
    adaptive: bool
    pairs: int
    samples: int


def average_sharpness(
    model: nn.Module,
    loss: Loss,
    batches: Any,
    *,
    rho: float,
    adaptive: bool = True,
    pairs: int = 50,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> AverageSharpness:
    """S_avg(ρ) = E L(w + δ) − L(w) for δ ~ N(0, ρ² diag(c²)) (Andriushchenko et al. 2023).

    c = |w| if adaptive, so that ρ is relative to each weight and the result does not change when a ReLU network's
    layers are rescaled; else c = 1. To second order it is ½ρ² tr(diag(c²) H). Draws come in pairs ±δ, which cancels the
    gradient's part. They are made on the CPU: the same for every device. `options` are those of `LossAt`.

    >>> model, data = nn.Linear(2, 1, bias=False), (torch.eye(2), torch.zeros(2, 1))
    >>> found = average_sharpness(model, nn.functional.mse_loss, data, rho=0.1, adaptive=False, pairs=400)
    >>> abs(found.value - 0.1**2) < 4 * found.error < 0.003  # H is the identity
    True
    """
    if pairs < 2:
        raise UserError(f"pairs: {pairs}, at least 2 are needed for a standard error")
    loss_at = LossAt(model, loss, batches, **options)
    w = loss_at.centre
    scale = rho * weight_scale(w, rho, adaptive)
    generator = torch.Generator().manual_seed(seed)
    centre = loss_at.at_centre()
    rises = torch.zeros(pairs, dtype=torch.float64)
    for i in range(pairs):
        delta = scale * torch.randn(len(w), generator=generator).to(w)
        rises[i] = (loss_at(w + delta) + loss_at(w - delta)) / 2 - centre
        if progress is not None:
            progress(i + 1, pairs)
    if not rises.isfinite().all():
        raise UserError(f"rho: {rho}; the loss at a perturbed model is not finite: take a smaller one")
    error = float(rises.std()) / math.sqrt(pairs)
    return AverageSharpness(float(rises.mean()), error, centre, rho, adaptive, pairs, loss_at.samples)
