"""Classification: one of C classes for every sample."""

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

    def check(self, data: Dataset, output_shape: tuple[int, ...]) -> None:
        if data.y_train.ndim != 1 or data.y_train.dtype.kind not in "iu":
            raise UserError(
                f"{data.name}: targets are {data.y_train.dtype} of shape {data.y_train.shape[1:]} a sample; "
                "classification needs a whole number, the class; name another task"
            )
        if len(output_shape) != 2 or output_shape[1] < data.classes:
            raise UserError(f"model: gives {format_outputs(output_shape)}; {data.classes} classes need {data.classes}")
