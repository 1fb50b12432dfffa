"""What is measured of a layer's activation: a number for every sample, [B, ...] to [B]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

OfBatch = Callable[[Tensor | None], Tensor]
"""Values [B] from the samples' weights [B], None for equal ones: of a measure that needs the whole batch."""
Measure = Callable[[Tensor], Tensor | OfBatch]


def mean_square(a: Tensor) -> Tensor:
    """MAN's measure of a layer: each sample's mean of squares, [B, ...] to [B]."""
    return a.square().flatten(1).mean(1)


def mean_square_and_variance(a: Tensor) -> OfBatch:
    """`mean_square`, plus a feature's unbiased variance over the batch (0 for one sample), averaged over features.

    A sample without weight, as padding has none, is not in the batch.
    """
    squares = mean_square(a)

    def values(weight: Tensor | None) -> Tensor:
        if weight is None:
            return squares + a.var(0, correction=min(1, len(a) - 1)).mean()
        kind, rows = torch.finfo(weight.dtype), a.flatten(1)
        share = (weight / weight.sum().clamp_min(kind.tiny))[:, None]
        variance = (share * (rows - (share * rows).sum(0)).square()).sum(0).mean()
        unbiased = variance / (1 - share.square().sum()).clamp_min(kind.eps)  # n samples of equal shares: 1 − 1/n
        return squares + unbiased.to(squares.dtype)

    return values


def mean_absolute(a: Tensor) -> Tensor:
    """Each sample's mean of absolute values, [B, ...] to [B]; half precision is summed in float32."""
    return (a.float() if a.itemsize == 2 else a).abs().reshape(*a.shape[:1], -1).mean(-1)


MEASURES: dict[str, Measure] = {f.__name__: f for f in (mean_square, mean_square_and_variance)}
"""The measures that a model's registry entry can name."""
