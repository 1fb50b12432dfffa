"""Shared by the tests of ActivationNorm: float64 by default, and a model with its ActivationNorm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedman.penalties.man import ActivationNorm
from tests.penalties.man_cases import Mixed


@pytest.fixture(autouse=True)
def _setting() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    assert torch.overrides._get_current_function_mode() is None


@pytest.fixture
def case() -> tuple[Mixed, ActivationNorm, Tensor]:
    model = Mixed()
    return model, ActivationNorm(model), torch.randn(7, 4)
