"""Functions compiled into one graph."""

import pytest
import torch

from fedman.execution.compiled import compile_graph


def chain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Many operations in the type of x, each of which rounds if it is computed by itself."""
    for factor in (1.1, 0.7, 1.3, 0.9):
        x = x * factor + 0.3
    return (x.tanh(),)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_operations_in_bf16_are_rounded_once(deterministic, tmp_path, monkeypatch):
    """Also where the compiler must not fuse products with sums, which by itself would round after every operation."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.randn(1000).bfloat16()
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn" if deterministic else "default")
    try:
        (given,) = compile_graph(chain, [x])(x)
    finally:
        torch.set_deterministic_debug_mode(mode)
    (exact,) = chain(x.double())
    rounded_each = (chain(x)[0].double() - exact).abs().max()
    assert given.dtype == torch.bfloat16
    torch.testing.assert_close(given.double(), exact, rtol=2**-8, atol=1e-6)  # half a unit in the last place, and a bit
    assert rounded_each > 2 * (given.double() - exact).abs().max()
