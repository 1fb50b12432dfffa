"""The GPU passes of a tap against its formula."""

from __future__ import annotations

import pytest
import torch

from fedman.kernels.tap import gradient, squares
from fedman.penalties.autograd import tap
from tests.kernels.kernel_checks import relative


@pytest.mark.parametrize("shape", [(1,), (5, 1), (3, 7), (2, 3, 5, 7), (2, 9001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("relu", [False, True])
def test_equals_formula(shape: tuple[int, ...], dtype: torch.dtype, relu: bool, device: torch.device) -> None:
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12, torch.float16: 2e-3}[dtype]
    a = torch.randn(shape, device=device, dtype=dtype)
    a = a.relu() if relu else a
    exact = a.double().reshape(shape[0], -1)
    s = squares(a, 1, a.numel())
    assert s.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert relative(s, exact.square().sum(1) / a.numel()) < tolerance
    above = torch.randn(shape, device=device, dtype=dtype)
    slopes = 100 * torch.rand(2 * shape[0], device=device, dtype=s.dtype)[::2]  # else float16 is subnormal
    expected = (exact * (2 * slopes.double() / a.numel())[:, None]).reshape(shape)
    assert relative(gradient(None, a, slopes, a.numel(), relu), expected) < tolerance
    expected = expected + (above * (a > 0) if relu else above)
    ours = gradient(above, a, slopes, a.numel(), relu)
    assert ours.dtype == dtype
    assert relative(ours, expected) < tolerance


def test_stack_and_layout(device: torch.device) -> None:
    """Rows are samples of every model of a stack; channels_last is a row in another order and stays one."""
    a = torch.randn(2, 3, 4, 5, device=device)
    assert relative(squares(a, 2, 20), a.square().mean((2, 3))) < 1e-6
    last = a.contiguous(memory_format=torch.channels_last)
    assert relative(squares(last, 1, 60), a.square().mean((1, 2, 3))) < 1e-6
    one = torch.ones(1, device=device).expand(2)
    ours = gradient(last, last, one, 60, relu=False)
    assert ours.stride() == last.stride()
    assert relative(ours, a * (1 + 2 / 60)) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("relu", [False, True])
def test_tap_on_a_gpu(memory_format: torch.memory_format, relu: bool) -> None:
    z = torch.randn(5, 6, 7, 8, device="cuda", dtype=torch.float64).contiguous(memory_format=memory_format)
    z.requires_grad_()
    x = z * 1
    a = x.relu() if relu else x
    out, s = tap(a, x)
    direct = a.square().mean((1, 2, 3)) / 5
    torch.testing.assert_close(s, direct, rtol=1e-12, atol=1e-14)
    (ours,) = torch.autograd.grad(out.sin().sum() + s.square().sum(), z, retain_graph=True)
    (expected,) = torch.autograd.grad(a.sin().sum() + direct.square().sum(), z)
    assert ours.stride() == z.stride()
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
