"""The loss around a model along one or two directions: L(w + α d₁ + β d₂) on a grid.

Random directions are filter-normalised (Li, Xu, Taylor, Studer & Goldstein 2018): each filter (a row of a linear
layer, an output channel of a convolution) gets the norm of the model's own, d_f ← d_f · ‖w_f‖ / ‖d_f‖, because the
loss of a ReLU network does not change when a filter is scaled and the next layer is scaled back. Biases and
normalisation parameters do not move. The same seed gives two models the same random numbers, so that their pictures
differ by the models alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedman.errors import UserError
from fedman.execution.device import matmul_precision
from fedman.flatness.data import Batches, Loss, call
from fedman.flatness.operator import Progress, select


@dataclass(frozen=True)
class Landscape:
    """Losses `[n]` or `[n, n]` (first direction, second direction) at the offsets `[n]`, in float64 on the CPU."""

    offsets: Tensor
    losses: Tensor
    samples: int


def random_direction(model: nn.Module, seed: int) -> Tensor:
    """A filter-normalised Gaussian direction `[P]` over the model's trainable parameters."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [p.shape for p in _weights(model).values()]
    return filter_normalise(model, torch.cat([torch.randn(s, generator=generator).flatten() for s in shapes]))


def filter_normalise(model: nn.Module, direction: Tensor) -> Tensor:
    """`[P]` with every filter at the norm of the model's own, and zeros for vectors (biases, scales)."""
    weights = list(_weights(model).values())
    parts = _check(direction, weights).split([w.numel() for w in weights])
    return torch.cat(
        [_filters(w.detach().cpu(), d.reshape(w.shape)).flatten() for w, d in zip(weights, parts, strict=True)]
    )


def landscape(
    model: nn.Module,
    loss: Loss,
    batches: Any,
    directions: Sequence[Tensor],
    *,
    span: float = 1.0,
    points: int = 41,
    chunk: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Landscape:
    """The mean loss on a grid of `points` (odd numbers hold the model itself) over [−span, span] along each direction.

    Directions are vectors `[P]`, taken as they are: `random_direction`, or eigenvectors times a length. `chunk`
    models are evaluated at once: 1 on a CPU, where stacked convolutions are slower, and 32 on CUDA, unless told.
    """
    if len(directions) not in (1, 2):
        raise UserError(f"directions: {len(directions)} given; one or two are allowed")
    if points < 2 or not span > 0:
        raise UserError(f"points, span: {points}, {span}; at least 2 points and a positive span are needed")
    weights = _weights(model)
    where = torch.device(device) if device is not None else next(iter(weights.values())).device
    data = Batches(batches, device=where, dtype=dtype, batch_size=batch_size, limit=limit)
    model = copy.deepcopy(model).to(where, dtype).eval().requires_grad_(False)
    chunk = chunk or (32 if where.type == "cuda" else 1)
    axes = torch.stack([_check(d, list(weights.values())) for d in directions]).to(where, dtype)
    centre = torch.cat([w.detach().flatten() for w in weights.values()]).to(where, dtype)

    offsets = torch.linspace(-span, span, points, dtype=torch.float64)
    grid = torch.cartesian_prod(*[offsets] * len(directions)).reshape(-1, len(directions))
    sizes = [w.numel() for w in weights.values()]

    def named(w: Tensor) -> dict[str, Tensor]:
        return {n: t.view(p.shape) for (n, p), t in zip(weights.items(), w.split(sizes), strict=True)}

    def single(w: Tensor, x: Any, y: Any) -> Tensor:
        return loss(call(lambda *args, **named_args: functional_call(model, named(w), args, named_args), x), y)

    stack = vmap(single, in_dims=(0, None, None))
    values = []
    with torch.no_grad(), matmul_precision("fp32"):
        for part in grid.split(chunk):
            models = centre + part.to(where, dtype) @ axes
            total = torch.zeros(len(part), dtype=torch.float64, device=where)
            for share, x, y in data:
                total += share * (stack(models, x, y) if len(part) > 1 else single(models[0], x, y)[None])
            values.append(total.cpu())
            if progress is not None:
                progress(sum(map(len, values)), len(grid))
    return Landscape(offsets, torch.cat(values).reshape([points] * len(directions)), data.samples)


def _weights(model: nn.Module) -> dict[str, nn.Parameter]:
    parameters = dict(model.named_parameters())
    return {name: parameters[name] for name in select(model, None)}


def _check(direction: Tensor, weights: Sequence[Tensor]) -> Tensor:
    size = sum(w.numel() for w in weights)
    if direction.shape != (size,):
        raise UserError(f"directions: one is of shape {tuple(direction.shape)}, [{size}] is needed")
    return direction.detach().cpu()


def _filters(weight: Tensor, direction: Tensor) -> Tensor:
    if weight.ndim < 2:
        return torch.zeros_like(direction)
    own, other = (t.flatten(1).norm(dim=1).to(direction) for t in (weight, direction))
    scale = torch.where(other > 0, own / other, 0)
    return direction * scale.reshape(-1, *[1] * (weight.ndim - 1))
