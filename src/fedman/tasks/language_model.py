"""Language modelling: the next token at every position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.data.catalog import PADDING
from fedman.errors import UserError
from fedman.tasks.base import Task

if TYPE_CHECKING:
    from torch import Tensor

    from fedman.data.dataset import Dataset


@dataclass(frozen=True)
class LanguageModel(Task):
    """Loss: cross-entropy of the next token, the mean over a sample's positions. Inputs and targets are ids `[B, T]`,
    the model's output `[B, T, V]`. Positions whose target is −1 do not count.

    Scores: accuracy of the next token in percent, and perplexity, exp of the mean cross-entropy, over all positions of
    a test set.
    """

    title = "language modelling"
    headline = "accuracy"
    higher_is_better = True

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        each = cross_entropy(output.movedim(-1, 1), target, ignore_index=PADDING, reduction="none")
        return each.sum(1) / self.weight(target).clamp(min=1)

    def scores(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        right = (output.argmax(-1) == target).sum(1)
        found = {"accuracy": 100.0 * right.double() / self.weight(target).clamp(min=1)}
        if type(self).loss is not LanguageModel.loss:
            found["cross-entropy"] = LanguageModel.loss(self, output, target)
        return found

    def weight(self, target: Tensor) -> Tensor:
        """The positions of each sample that count."""
        return (target != PADDING).sum(1)

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        entropy = means["cross-entropy" if "cross-entropy" in means else "loss"]
        return {"accuracy": means["accuracy"], "perplexity": math.exp(min(entropy, 700.0))}

    def check(self, data: Dataset, output_shape: tuple[int, ...]) -> None:
        x, y = data.x_train, data.y_train
        if x.dtype.kind not in "iu" or y.dtype.kind not in "iu" or x.shape != y.shape or x.ndim != 2:
            raise UserError(
                f"{data.name}: inputs {x.dtype} {x.shape} and targets {y.dtype} {y.shape} must both be ids [n, T]"
            )
        if len(output_shape) != 3 or output_shape[1] != x.shape[1] or output_shape[2] < data.classes:
            given, wanted = ", ".join(map(str, output_shape[1:])), f"[B, {x.shape[1]}, V], V at least {data.classes}"
            raise UserError(f"model: gives an output of shape [B, {given}]; wanted is {wanted}, as of model=lstm")
        if data.y_test.size and (data.y_test == PADDING).all():
            raise UserError(f"{data.name}: all targets of the test set are {PADDING}; none of its positions counts")
