"""Models evaluated at once by `torch.func.vmap`: every operation of the module runs for all rows in one call."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedman.execution import stackable
from fedman.execution.base import Batch, Execution
from fedman.execution.device import strictly_deterministic
from fedman.execution.one_by_one import OneByOne
from fedman.execution.recurrent import unroll
from fedman.penalties import Penalty
from fedman.tasks import Task


class Vmapped(OneByOne):
    """The module vectorised over the rows; a single row is evaluated plainly.

    Recurrent layers are written out, since the fused ones cannot be stacked. `stackable` says what else is replaced.
    """

    title = "vmap"
    stacks = True
    slow = ""  # an operation of the module that vmap stacks badly, known after the first forward pass

    def __init__(self, model: nn.Module, task: Task, penalty: Penalty, precision: str = "fp32") -> None:
        super().__init__(model, task, penalty, precision)
        # of operations that vmap takes row by row, as the plain module does
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
        for copied in (self._plain, self._tapped, self._evaluated):
            unroll(copied)

    def gradient(self, W: Tensor, batch: Batch, zeta: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        if len(W) == 1:
            return super().gradient(W, batch, zeta)
        with strictly_deterministic(self.strict):
            return Execution.gradient(self, W, batch, zeta)

    def losses(self, W: Tensor, batch: Batch, penalised: bool) -> tuple[Tensor, Tensor, Tensor]:
        if len(W) == 1:
            return super().losses(W, batch, penalised)
        if batch.buffers is None and self.buffers.names:
            batch = batch._replace(buffers=self._initial_buffers.to(W).expand(len(W), -1))
        given = {name: v for name, v in batch._asdict().items() if v is not None}

        def loss(w: Tensor, *row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._loss(w, batch._replace(**dict(zip(given, row, strict=True))), penalised)

        stacked = vmap(loss)  # of flat arguments: nested ones PyTorch walks through at every call
        if not stackable.applies(W):
            with stackable.StackableOnCPU():
                return stacked(W, *given.values())
        with stackable.StackableOperations() as mode:
            found = stacked(W, *given.values())
        self.slow = mode.slow
        return found
