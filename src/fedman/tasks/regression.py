"""Regression: numbers for every sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.errors import UserError
from fedman.tasks.base import Task, format_outputs

if TYPE_CHECKING:
    from torch import Tensor

    from fedman.data.dataset import Dataset


@dataclass(frozen=True)
class Regression(Task):
    """Loss: squared error, the mean over a sample's outputs. Scores: root of its mean over samples, absolute error."""

    title = "regression"
    headline = "rmse"
    higher_is_better = False

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.flatten(1) - target.reshape(len(target), -1)).square().mean(1)

    def scores(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        found = {"mae": (output.flatten(1) - target.reshape(len(target), -1)).abs().mean(1)}
        if type(self).loss is not Regression.loss:
            found["mse"] = Regression.loss(self, output, target)
        return found

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        return {"rmse": means["mse" if "mse" in means else "loss"] ** 0.5, "mae": means["mae"]}

    def outputs(self, data: Dataset) -> int:
        return data.y_train[0].size

    def check(self, data: Dataset, output_shape: tuple[int, ...]) -> None:
        if data.y_train.dtype.kind != "f":
            raise UserError(f"{data.name}: targets are {data.y_train.dtype}; regression needs floating-point numbers")
        columns = data.y_train[0].size
        if math.prod(output_shape[1:]) != columns:
            raise UserError(f"model: gives {format_outputs(output_shape)}; the targets need {columns}")
