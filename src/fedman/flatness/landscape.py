"""The loss around a model along one or two directions: L(w + α d₁ + β d₂) on a grid.

Random directions are filter-normalised (Li, Xu, Taylor, Studer & Goldstein 2018): each filter (a row of a linear
layer, an output channel of a convolution) gets the norm of the model's filter, d_f ← d_f · ‖w_f‖ / ‖d_f‖, because the
loss of a ReLU network does not change when a filter is scaled and the next layer is scaled back. Biases and
normalisation parameters do not move. The same seed gives two models the same random numbers, so that their landscapes
differ only by the models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.flatness.data import Loss
from fedman.flatness.loss_at import LossAt
from fedman.flatness.operator import Progress, select
from fedman.models.parameters import ParameterLayout


@dataclass(frozen=True)
class Landscape:
    """Losses `[n]` or `[n, n]` (first direction, second direction) at the offsets `[n]`, in float64 on the CPU."""

    offsets: Tensor
    losses: Tensor
    samples: int


def random_direction(model: nn.Module, seed: int) -> Tensor:
    """A filter-normalised Gaussian direction `[P]` over the model's trainable parameters."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(shape, generator=generator).flatten() for shape in select(model).shapes]
    return filter_normalise(model, torch.cat(parts))


def filter_normalise(model: nn.Module, direction: Tensor) -> Tensor:
    """The direction `[P]` with every filter scaled to the norm of the model's, and zeros for biases and scales."""
    layout = select(model)
    parts = layout.unflatten(_check(direction, layout))
    return layout.flatten({name: _scaled(d, model.get_parameter(name).detach().cpu()) for name, d in parts.items()})


def landscape(
    model: nn.Module,
    loss: Loss,
    batches: Any,
    directions: Sequence[Tensor],
    *,
    span: float = 1.0,
    points: int = 41,
    dtype: torch.dtype = torch.float32,
    batch_size: int | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Landscape:
    """The mean loss on a grid of `points` (odd numbers hold the model itself) over [−span, span] along each direction.

    Directions are vectors `[P]` that are not rescaled: `random_direction`, or eigenvectors times a length.
    """
    if len(directions) not in (1, 2):
        raise UserError(f"directions: {len(directions)} given; one or two are allowed")
    if points < 2 or not span > 0:
        raise UserError(f"points, span: {points}, {span}; at least 2 points and a positive span are needed")
    loss_at = LossAt(model, loss, batches, dtype=dtype, batch_size=batch_size, limit=limit)
    axes = torch.stack([_check(d, loss_at.layout) for d in directions]).to(loss_at.centre)
    offsets = torch.linspace(-span, span, points, dtype=torch.float64)
    grid = torch.cartesian_prod(*[offsets] * len(directions)).reshape(-1, len(directions))
    losses = torch.zeros(len(grid), dtype=torch.float64)
    for i, place in enumerate(grid.to(axes)):
        losses[i] = loss_at(loss_at.centre + (place[:, None] * axes).sum(0))
        if progress is not None:
            progress(i + 1, len(grid))
    return Landscape(offsets, losses.reshape([points] * len(directions)), loss_at.samples)


def _check(direction: Tensor, layout: ParameterLayout) -> Tensor:
    if direction.shape != (layout.size,):
        raise UserError(f"directions: one is of shape {tuple(direction.shape)}, [{layout.size}] is needed")
    return direction.detach().cpu()


def _scaled(direction: Tensor, weight: Tensor) -> Tensor:
    if weight.ndim < 2:
        return torch.zeros_like(direction)
    own, other = (t.flatten(1).norm(dim=1).to(direction) for t in (weight, direction))
    scale = torch.where(other > 0, own / other, 0)
    return direction * scale.reshape(-1, *[1] * (weight.ndim - 1))
