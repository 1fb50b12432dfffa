"""m-sharpness: the worst case on every m samples for themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.flatness.ascent import Ascent
from fedman.flatness.data import Loss
from fedman.flatness.loss_at import LossAt
from fedman.flatness.operator import Progress


@dataclass(frozen=True)
class MSharpness:
    """The mean of the groups' worst cases, and each group's `[groups]`."""

    value: float
    groups: Tensor
    samples: int


def m_sharpness(
    model: nn.Module,
    loss: Loss,
    batches: Any,
    ascent: Ascent,
    *,
    m: int,
    progress: Progress | None = None,
    **options: Any,
) -> MSharpness:
    """S_m(ρ) = Σ_B (|B|/n) max_{‖δ/c‖_p ≤ ρ} L_B(w + δ) − L_B(w) over groups B of m samples (Foret et al. 2021).

    Groups are consecutive samples; the last one may be smaller. Every group has a perturbation of its own, so S_m is
    at least the worst case of all samples together. `options` are those of `LossAt`, except `batch_size`: a group is
    one batch.

    >>> model, data = nn.Linear(1, 1, bias=False), (torch.tensor([[3.0], [-5.0]]), torch.zeros(2))
    >>> _ = nn.init.zeros_(model.weight)
    >>> m_sharpness(model, lambda output, target: output.mean(), data, Ascent(rho=1.0, adaptive=False), m=1).groups
    tensor([3., 5.], dtype=torch.float64)
    """
    if m < 1:
        raise UserError(f"m: {m}, at least 1 is needed")
    loss_at = LossAt(model, loss, batches, batch_size=m, **options)
    count = len(loss_at.batches)
    rises, shares = torch.zeros(2, count, dtype=torch.float64)
    for i, (share, part) in enumerate(loss_at.batch_by_batch()):
        if part.samples < m and i + 1 < count:
            raise UserError(f"m: {m}; a batch of the data holds {part.samples}, batches of {m} or one pair are needed")
        rises[i], shares[i] = ascent(part)[0], share
        if progress is not None:
            progress(i + 1, count)
    return MSharpness(float(rises @ shares), rises, loss_at.samples)
