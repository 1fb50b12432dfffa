"""Shared by the tests of the kernels: tolerances and the comparison with a float64 reference."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = not torch.cuda.is_available()

LATER = pytest.mark.slow if INTERPRETED else ()
"""The mark of points that take the interpreter long, and a GPU no time."""

PRECISIONS = ["fp32", "bf16"] if INTERPRETED else ["fp32", "bf16", "tf32"]  # interpreted, tf32 is fp32

TOLERANCE = {
    "fp32": 2e-6,
    "tf32": 2e-6 if INTERPRETED else 2e-3,
    "bf16": 4e-2 if INTERPRETED else 2e-2,  # the interpreter cuts the mantissa off instead of rounding
}

GRADIENT = {"fp32": 1e-5, "tf32": 6e-2, "bf16": 3e-1}
"""For a whole model's gradient: in a small model a rounding that flips one ReLU or one maximum is visible."""


def with_precisions(cases: Sequence[tuple[Any, ...]], both: Collection[int]) -> list[Any]:
    """Every case in every precision. The interpreter takes seconds for each, and bf16 differs from fp32 in tiles and in
    type alone: `both` are the places of the cases that it plays in bf16 in the fast part of the tests too."""
    return [
        pytest.param(*case, precision, marks=LATER if precision == "bf16" and i not in both else ())
        for i, case in enumerate(cases)
        for precision in PRECISIONS
    ]


def relative(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in float64; infinite where shapes differ or a value is not finite."""
    if value.shape != reference.shape or not torch.isfinite(value).all():
        return float("inf")
    value, reference = value.double(), reference.double()
    return ((value - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def shares(clients: int, batch: int, device: torch.device) -> Tensor:
    """Each sample's weight in its batch mean: uneven, with sum one."""
    weight = torch.rand(clients, batch, device=device) + 0.1
    return weight / weight.sum(1, keepdim=True)
