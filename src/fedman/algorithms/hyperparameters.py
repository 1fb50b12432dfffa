"""Hyper-parameters of an algorithm: its dataclass fields, with their descriptions and bounds."""

from __future__ import annotations

import math
from dataclasses import field, fields
from typing import TypeVar

from fedman.algorithms.base import Algorithm

Value = TypeVar("Value", bool, int, float)


def hyperparameter(default: Value, description: str, minimum: float = 0.0, maximum: float = math.inf) -> Value:
    """A dataclass field; its metadata are keyword arguments of `pydantic.Field`. Bounds hold for numbers."""
    bounds: dict[str, float] = {} if isinstance(default, bool) else {"ge": minimum, "le": maximum}
    made: Value = field(default=default, metadata={"description": description, **bounds})
    return made


def hyperparameters(algorithm: type[Algorithm]) -> dict[str, bool | int | float]:
    """The hyper-parameters of an algorithm and their defaults: {"alpha": 0.01, ...}."""
    return {f.name: f.default for f in fields(algorithm)}  # type: ignore[misc]
