"""Models evaluated one after the other: the plain module, whatever it does inside."""

from __future__ import annotations

import torch
from torch import Tensor

from fedman.execution.base import Batch, Execution, of_rows
from fedman.execution.device import strictly_deterministic


class OneByOne(Execution):
    """The module called once for every row. On a CPU this is faster than stacking, but for very small models."""

    title = "plain"
    stacks = False
    strict = False  # whether all that the module does has deterministic kernels

    def losses(self, W: Tensor, batch: Batch, penalised: bool) -> tuple[Tensor, Tensor, Tensor]:
        # not `W[i]`, of which every gradient would be a matrix [S, P], zero but for a row; of `squeeze` it is a view
        each = W.unbind() if len(W) > 1 else [W.squeeze(0)]
        rows = [self._loss(w, batch.row(i), penalised) for i, w in enumerate(each)]
        losses, terms, buffers = map(torch.stack, zip(*rows, strict=True))
        return losses, terms, buffers

    def gradient(self, W: Tensor, batch: Batch, zeta: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        with strictly_deterministic(self.strict):
            gradient = super().gradient
            rows = [gradient(*of_rows(slice(i, i + 1), W, batch, zeta)) for i in range(len(W))]
            if len(rows) == 1:
                return rows[0]
            gradients, losses, buffers = map(torch.cat, zip(*rows, strict=True))
            return gradients, losses, buffers
