"""The kernels run on the GPU where there is one, elsewhere through Triton's interpreter (on small shapes)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fedman.execution.device import matmul_precision

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the tests import one

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter, which would multiply the bits of bf16 values, multiplies them as fp32."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(v: Any) -> Any:
        if v.dtype.scalar != tl.bfloat16:
            return v
        return TensorHandle((v.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    real = InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda self, a, b, *rest: real(self, widened(a), widened(b), *rest)
    )


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seed_and_exact_reference() -> Iterator[None]:
    torch.manual_seed(20240104)
    with matmul_precision("fp32"):  # cuDNN's own default is TF32
        yield
