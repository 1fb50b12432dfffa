"""Hyper-parameters are the dataclass fields of an algorithm, with a description and bounds for its users."""

from __future__ import annotations

import math
from dataclasses import field, fields
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from fedman.algorithms.base import Algorithm

Value = bool | int | float
T = TypeVar("T", bool, int, float)


def hyperparameter(default: T, description: str, minimum: float = 0.0, maximum: float = math.inf) -> T:
    """A dataclass field; its metadata are keyword arguments of `pydantic.Field`. Bounds hold for numbers."""
    bounds: dict[str, float] = {} if isinstance(default, bool) else {"ge": minimum, "le": maximum}
    made: T = field(default=default, metadata={"description": description, **bounds})
    return made


def hyperparameters(algorithm: type[Algorithm]) -> dict[str, Value]:
    """The hyper-parameters of an algorithm and their defaults: {"alpha": 0.01, ...}."""
    return {f.name: f.default for f in fields(algorithm)}  # type: ignore[misc]
