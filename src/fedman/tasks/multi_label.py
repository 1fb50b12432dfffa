"""Multi-label classification: any number of C labels for every sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.errors import UserError
from fedman.tasks.base import Task, format_outputs

if TYPE_CHECKING:
    from torch import Tensor

    from fedman.data.dataset import Dataset


@dataclass(frozen=True)
class MultiLabel(Task):
    """Loss: binary cross-entropy of each label, the mean over labels. Targets are 0 or 1, `[B, C]`.

    Scores in percent: labels that are right, and samples all of whose labels are (`exact`).
    """

    title = "multi-label classification"
    headline = "accuracy"
    higher_is_better = True

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        from torch.nn.functional import binary_cross_entropy_with_logits

        return binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction="none").mean(1)

    def scores(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        right = (output > 0) == (target > 0.5)
        return {"accuracy": 100.0 * right.double().mean(1), "exact": 100.0 * right.all(1)}

    def outputs(self, data: Dataset) -> int:
        return data.y_train[0].size

    def check(self, data: Dataset, output_shape: tuple[int, ...]) -> None:
        y = data.y_train
        if y.ndim != 2 or ((y != 0) & (y != 1)).any():
            raise UserError(f"{data.name}: targets of shape {y.shape} must be [n, labels], each 0 or 1")
        if tuple(output_shape[1:]) != y.shape[1:]:
            raise UserError(f"model: gives {format_outputs(output_shape)}; {y.shape[1]} labels need {y.shape[1]}")
