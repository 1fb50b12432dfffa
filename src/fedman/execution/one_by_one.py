"""Models evaluated one after the other: the plain module, whatever it does inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedman.execution.base import Execution


class OneByOne(Execution):
    """The module called once for every row. On a CPU this is faster than stacking, but for very small models."""

    stacks = False

    def losses(self, W: Tensor, x: Any, y: Tensor, weight: Tensor | None, penalised: bool) -> tuple[Tensor, Tensor]:
        rows = [self._loss(W[i], x[i], y[i], None if weight is None else weight[i], penalised) for i in range(len(W))]
        losses, terms = zip(*rows, strict=True)
        return torch.stack(losses), torch.stack(terms)
