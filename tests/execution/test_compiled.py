"""Functions compiled into one graph."""

import pytest
import torch
import torch.nn.functional as F

from fedman.execution import compiled
from fedman.execution.compiled import compile_graph, trace
from fedman.execution.training_pass import TrainingPass


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


@pytest.mark.slow
def test_a_norm_and_dropout_are_compiled(tmp_path, monkeypatch):
    """Dropout's hash has numbers beyond 32 bits, with which inductor's variance needs help. What is compiled is not
    called: of PyTorch 2.11, on a CPU alone, it ended the process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def dropped(x):
        with TrainingPass(None, None):
            return (F.dropout(F.layer_norm(x, (40,)), 0.3),)

    compile_graph(dropped, [torch.randn(6, 40)])


def test_numbers_written_into_a_tensor_are_where_it_is():
    """A CUDA graph cannot copy them from the host; "meta" stands for a device."""

    def write(x):
        x = x.clone()
        x[:, 0] = 1
        return (x,)

    graph = trace(write, [torch.zeros(3, 2)])
    assert graph(torch.zeros(3, 2))[0].tolist() == [[1, 0]] * 3
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.fill_.Tensor:
            node.meta["val"] = torch.empty(3, device="meta")
    compiled.bring_numbers(graph)
    numbers = [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    assert [v.device.type for v in numbers] == ["meta"]
