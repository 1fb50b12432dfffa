"""Models evaluated at once by `torch.func.vmap`: every operation of the module runs for all rows in one call."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.func import vmap

from fedman.execution.one_by_one import OneByOne


class Vmapped(OneByOne):
    """The module vectorised over the rows; a single row is evaluated plainly."""

    stacks = True

    def losses(self, W: Tensor, x: Any, y: Tensor, weight: Tensor | None, penalised: bool) -> tuple[Tensor, Tensor]:
        if len(W) == 1:
            return super().losses(W, x, y, weight, penalised)
        stack = vmap(self._loss, in_dims=(0, 0, 0, None if weight is None else 0, None))
        return stack(W, x, y, weight, penalised)
