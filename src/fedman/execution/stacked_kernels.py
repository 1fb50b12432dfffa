"""Models evaluated at once by the GPU kernels of `fedman.kernels`, which serve `ConvNet` alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from fedman import kernels
from fedman.execution.base import Execution
from fedman.models.convnet import ConvNet
from fedman.penalties.man import Measure, mean_square, mean_square_and_variance

SAMPLES = 500  # of a test set for each copy of the model: the kernels want several rows


class StackedKernels(Execution):
    """Losses and gradients of all rows in a few launches; MAN's terms are found on the way, whether used or not."""

    def __init__(
        self,
        model: nn.Module,
        shape: tuple[int, ...],
        device: torch.device,
        *,
        output: bool = True,
        layers: Mapping[str, Measure] | None = None,
        precision: str = "fp32",
    ) -> None:
        assert isinstance(model, ConvNet)  # `supports` has said so
        super().__init__(model, output=output, layers=layers, precision=precision)
        from fedman.kernels import update
        from fedman.kernels.convnet import StackedConvNet

        names, measures = _measured(model, layers)
        self.kernels = StackedConvNet(model, shape, precision, _varied(names, measures))
        self.image_layout, self.fused = (self.kernels.padding, self.kernels.dtype), update
        chosen = [*(name in measures for name in names), output]
        self.layers = list(compress([*names, "output"], chosen))
        self._chosen = torch.tensor(chosen, device=device)
        self._places = self._chosen.nonzero()[:, 0]

    @staticmethod
    def supports(
        model: nn.Module,
        shape: tuple[int, ...],
        device: torch.device,
        *,
        layers: Mapping[str, Measure] | None = None,
        precision: str = "fp32",
    ) -> bool:
        """Whether the kernels serve this model, its measured layers and this device."""
        if precision == "fp64" or not isinstance(model, ConvNet) or not kernels.available(device):
            return False
        from fedman.kernels.convnet import StackedConvNet

        names, measures = _measured(model, layers)
        known = set(measures) <= set(names) and set(measures.values()) <= {mean_square, mean_square_and_variance}
        return known and StackedConvNet.supports(model, shape, _varied(names, measures))

    def copy(self) -> Execution:
        """Itself: the kernels keep nothing between calls."""
        return self

    def prepare(self, x: Tensor) -> Any:
        return self.kernels.images(x)

    def prepare_test(self, x: Tensor) -> Tensor:
        return self.kernels.prepare(x.movedim(1, -1))

    def losses(self, W: Tensor, x: Any, y: Tensor, weight: Tensor | None, man: bool) -> tuple[Tensor, Tensor]:
        ce, terms = self.kernels.losses(W, x, y, weight)
        return ce, terms.index_select(1, self._places) if man else terms[:, :0]

    def gradient(
        self, W: Tensor, x: Any, y: Tensor, weight: Tensor | None, zeta: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        zetas = (zeta[:, None] if isinstance(zeta, Tensor) else zeta) * self._chosen
        ce, _, gradient = self.kernels.gradient(W, x, y, zetas, weight)
        return gradient, ce

    @torch.no_grad()
    def scores(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        rows = -(-len(y) // SAMPLES)
        if len(y) % rows:
            parts = zip(x.split(SAMPLES), y.split(SAMPLES), strict=True)
            return torch.stack([self.scores(w, *part) for part in parts]).sum(0)
        return super().scores(w, x.unflatten(0, (rows, -1)), y)

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """The outputs of one model `[P]` on prepared samples `[rows, n, ...]`, as one batch."""
        return self.kernels.logits(w.expand(len(x), -1), x).flatten(0, 1)


def _measured(model: ConvNet, layers: Mapping[str, Measure] | None) -> tuple[list[str], dict[str, Measure]]:
    """The names of the model's activations, and the measures of those that MAN counts."""
    names = [f"relus.{i}" for i in range(len(model.relus))]
    return names, dict.fromkeys(names, mean_square) if layers is None else dict(layers)


def _varied(names: list[str], measures: Mapping[str, Measure]) -> list[int]:
    """The activations whose variance over the batch counts too."""
    return [names.index(name) for name, measure in measures.items() if measure is mean_square_and_variance]
