"""The kernels run on the GPU where there is one, elsewhere through Triton's interpreter (on small shapes)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

from fedman.execution.device import matmul_precision

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the tests import one

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seed_and_exact_reference() -> Iterator[None]:
    torch.manual_seed(20240104)
    with matmul_precision("fp32"):  # cuDNN's own default is TF32
        yield
