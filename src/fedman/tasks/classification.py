"""Classification: one of C classes for every sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.errors import UserError
from fedman.tasks.base import Task, format_outputs
from fedman.tasks.targets import fitting

if TYPE_CHECKING:
    from torch import Tensor

    from fedman.data.dataset import Dataset


@dataclass(frozen=True)
class Classification(Task):
    """Loss: cross-entropy −log softmax(o)_y. Score: accuracy in percent."""

    title = "classification"
    headline = "accuracy"
    higher_is_better = True

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(output, target, reduction="none")

    def mean_loss(self, output: Tensor, target: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(output, target)

    def scores(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return {"accuracy": 100.0 * (output.argmax(-1) == target)}

    def outputs(self, data: Dataset) -> int:
        _require_classes(data)
        return data.classes

    def check(self, data: Dataset, output_shape: tuple[int, ...]) -> None:
        _require_classes(data)
        if len(output_shape) != 2 or output_shape[1] < data.classes:
            raise UserError(f"model: gives {format_outputs(output_shape)}; {data.classes} classes need {data.classes}")


def _require_classes(data: Dataset) -> None:
    """Refuse targets that are no classes, and say what to do."""
    y = data.y_train
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise UserError(
            f"{data.name}: targets are {y.dtype} of shape {y.shape[1:]} a sample; classification needs a whole number, "
            f"the class; {fitting(data.x_train, y).advice}"
        )
