"""Models evaluated at once by the GPU kernels of `fedman.kernels`, which serve `ConvNet` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from fedman import kernels
from fedman.execution.base import Batch, Execution
from fedman.models.convnet import ConvNet
from fedman.penalties import Penalty, mean_squares_of
from fedman.penalties.measures import Measure, mean_square, mean_square_and_variance
from fedman.tasks import Classification, Task

SAMPLES = 500  # of a test set for each copy of the model: the kernels want several rows


class StackedKernels(Execution):
    """Losses and gradients of all rows in a few launches; MAN's terms are found on the way, whether used or not."""

    title = "kernels"

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        penalty: Penalty,
        precision: str,
        shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        assert isinstance(model, ConvNet)  # `supports` has said so
        super().__init__(model, task, penalty, precision)
        from fedman.kernels import update
        from fedman.kernels.convnet import StackedConvNet

        names, measures, output = _measured(model, penalty)
        self.kernels = StackedConvNet(model, shape, precision, _varied(names, measures))
        self.image_layout, self.fused = (self.kernels.padding, self.kernels.dtype), update
        chosen = [*(name in measures for name in names), output]
        self.terms = list(compress([*names, "output"], chosen))
        self._chosen = torch.tensor(chosen, device=device)
        self._places = self._chosen.nonzero()[:, 0]

    @staticmethod
    def supports(
        model: nn.Module, task: Task, penalty: Penalty, precision: str, shape: tuple[int, ...], device: torch.device
    ) -> bool:
        """Whether the kernels serve this model, task, penalty and device."""
        if precision == "fp64" or not isinstance(model, ConvNet) or not kernels.available(device):
            return False
        if not all(p.requires_grad for p in model.parameters()):
            return False
        if type(task) is not Classification or mean_squares_of(penalty) is None:
            return False
        from fedman.kernels.convnet import StackedConvNet

        names, measures, _ = _measured(model, penalty)
        known = set(measures) <= set(names) and set(measures.values()) <= {mean_square, mean_square_and_variance}
        return known and StackedConvNet.supports(model, shape, _varied(names, measures))

    def copy(self) -> Execution:
        """Itself: the kernels keep nothing between calls."""
        return self

    def rehearse(self, work: Callable[[], object]) -> None:
        """Compile the kernels that `work` launches, side by side."""
        from fedman.kernels.compiling import side_by_side

        with side_by_side():
            work()
        torch.cuda.empty_cache()  # graphs have memory of their own

    def prepare(self, x: Tensor) -> Any:
        return self.kernels.images(x)

    def prepare_test(self, x: Tensor) -> Tensor:
        return self.kernels.prepare(x.movedim(1, -1))

    def losses(self, W: Tensor, batch: Batch, penalised: bool) -> tuple[Tensor, Tensor, Tensor]:
        loss, terms = self.kernels.losses(W, batch.x, batch.y, batch.weight)
        return loss, terms.index_select(1, self._places) if penalised else terms[:, :0], W[:, :0]

    def gradient(self, W: Tensor, batch: Batch, zeta: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        zetas = (zeta[:, None] if isinstance(zeta, Tensor) else zeta) * self._chosen
        loss, _, gradient = self.kernels.gradient(W, batch.x, batch.y, zetas, batch.weight)
        return gradient, loss, W[:, :0]

    @torch.no_grad()
    def scores(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        rows = -(-len(y) // SAMPLES)
        if len(y) % rows:
            parts = zip(x.split(SAMPLES), y.split(SAMPLES), strict=True)
            return torch.cat([self.scores(w, *part) for part in parts])
        return super().scores(w, x.unflatten(0, (rows, -1)), y)

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """The outputs of one model `[P]` on prepared samples `[rows, n, ...]`, as one batch."""
        return self.kernels.logits(w.expand(len(x), -1), x).flatten(0, 1)


def _measured(model: ConvNet, penalty: Penalty) -> tuple[list[str], dict[str, Measure], bool]:
    """The names of the model's activations, the measures of those that MAN counts, and whether the logits count too."""
    found = mean_squares_of(penalty)
    assert found is not None  # `supports` has said so
    layers, output = found
    names = [f"relus.{i}" for i in range(len(model.relus))]
    return names, dict.fromkeys(names, mean_square) if layers is None else dict(layers), output


def _varied(names: list[str], measures: Mapping[str, Measure]) -> list[int]:
    """The activations whose variance over the batch counts too."""
    return [names.index(name) for name, measure in measures.items() if measure is mean_square_and_variance]
