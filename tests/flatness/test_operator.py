"""Hessian-vector products against dense Hessians; data handling; bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedman.errors import UserError
from fedman.flatness import Hessian, Mean, layer_hessians, operator
from tests.flatness.flat_cases import CASES, cnn, dense, dense_case, mlp, rows


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("keep", [False, True])
def test_the_products_are_those_of_the_dense_hessian(case: str, keep: bool) -> None:
    model, (x, y) = CASES[case][0](), CASES[case][1]()
    expected = dense_case(case)
    hessian = Hessian(model, F.cross_entropy, (x, y), dtype=torch.float64, batch_size=4, keep_graphs=keep)
    vectors = torch.randn(3, hessian.size, dtype=torch.float64)
    for _ in range(2):
        assert torch.allclose(hessian(vectors), vectors @ expected, rtol=1e-10, atol=1e-12)
    assert hessian.products == 6
    assert hessian.samples == len(y)


def test_the_matrix_is_symmetric_and_the_models_own_state_is_untouched() -> None:
    model = mlp().train()
    before = [p.clone() for p in model.parameters()]
    matrix = Hessian(model, F.cross_entropy, rows(), dtype=torch.float64).dense()
    assert torch.allclose(matrix, matrix.T, atol=1e-13)
    assert model.training
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_fp32_is_the_default_and_close() -> None:
    model, (x, y) = mlp(), rows()
    matrix = Hessian(model, F.cross_entropy, (x, y)).dense()
    assert matrix.dtype == torch.float32
    assert (matrix - dense(model, x, y)).norm() < 1e-5 * matrix.norm()


@pytest.mark.parametrize(
    ("names", "entries"),
    [(["2"], range(36, 64)), (["0.weight"], range(30)), (["*.bias"], [*range(30, 36), *range(60, 64), *range(76, 79)])],
)
def test_a_block_is_the_submatrix(names: list[str], entries: list[int]) -> None:
    model, (x, y) = mlp(), rows()
    block = Hessian(model, F.cross_entropy, (x, y), parameters=names, dtype=torch.float64)
    index = torch.tensor(list(entries))
    assert torch.allclose(block.dense(), dense(model, x, y)[index][:, index], atol=1e-12)


def test_the_gradient_is_autograds() -> None:
    model, (x, y) = mlp().double(), rows()
    loss = F.cross_entropy(model(x.double()), y)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    hessian = Hessian(model, F.cross_entropy, (x, y), dtype=torch.float64, batch_size=4)
    value, gradient = hessian.loss_and_gradient()
    assert torch.allclose(gradient, expected, atol=1e-13)
    assert torch.allclose(value, loss.detach())


def test_a_loss_without_curvature_and_unused_parameters_give_zeros() -> None:
    x, _ = rows()
    flat = Hessian(nn.Linear(5, 1), lambda out, y: out.mean(), (x, x))
    assert not flat(torch.ones(1, flat.size)).any()

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(5, 1), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    hessian = Hessian(Partly(), F.mse_loss, (x, torch.zeros(len(x), 1)))
    product = hessian(torch.ones(1, hessian.size))[0]
    assert product[:6].all()
    assert not product[6:].any()
    blocks = layer_hessians(Partly(), F.mse_loss, (x, torch.zeros(len(x), 1)))
    assert [bool(block.dense().any()) for _, block in blocks] == [True, False]


def test_the_mean_operator_is_the_hessian_of_the_mean_loss() -> None:
    model, (x, y) = mlp(), rows(24)
    parts = [Hessian(model, F.cross_entropy, (x[s], y[s]), dtype=torch.float64) for s in (slice(12), slice(12, None))]
    whole = Mean(parts)(torch.eye(79, dtype=torch.float64))
    assert torch.allclose(whole, dense(model, x, y), atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": ["fc9"]}, "parameters: 'fc9' matches none; the modules with parameters are 0, 2, 4"),
        ({"parameters": []}, "parameters: an empty list"),
        ({"batches": []}, "batches: no samples"),
        ({"batches": (torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))}, "batches: no samples"),
        ({"batches": [torch.zeros(3, 5)]}, "batches: an item is a Tensor"),
        ({"batches": [(torch.zeros(3, 5), 3)]}, "batches: a target is a int"),
        ({"batch_size": 0}, "batch_size: 0"),
        ({"limit": -1}, "limit: -1"),
        ({"dtype": torch.float16}, "dtype: torch.float16; torch.float32 and torch.float64"),
        ({"model": nn.Flatten()}, "model: Flatten has no parameters"),
        ({"model": nn.Linear(5, 3).requires_grad_(False)}, "model: Linear has no parameters"),
    ],
)
def test_bad_input_is_one_line(change: dict, message: str) -> None:
    arguments = {"model": mlp(), "loss": F.cross_entropy, "batches": rows()} | change
    with pytest.raises(UserError) as error:
        Hessian(**arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_losses_and_vectors_are_refused_when_met() -> None:
    x, y = rows()
    v = torch.ones(1, 79)
    with pytest.raises(UserError, match="loss: not finite"):
        Hessian(mlp(), F.cross_entropy, (x * torch.inf, y))(v)
    with pytest.raises(UserError, match="loss: not finite"):
        Hessian(mlp(), F.cross_entropy, (x * torch.nan, y)).loss_and_gradient()
    with pytest.raises(UserError, match=r"loss: of shape \(23,\), a scalar"):
        Hessian(mlp(), lambda a, b: F.cross_entropy(a, b, reduction="none"), (x, y))(v)
    with pytest.raises(UserError, match=r"vectors: of shape \(79,\), \[k, 79\]"):
        Hessian(mlp(), F.cross_entropy, (x, y))(v[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_product() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 1, 6, 6, generator=generator), torch.randint(0, 3, (9,), generator=generator)
    expected = dense(cnn(), x, y)
    matrix = Hessian(cnn().cuda(), F.cross_entropy, (x, y)).dense().cpu()
    assert (matrix - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(("free", "kept"), [(40, True), (39, False)])
def test_graphs_are_kept_where_they_take_half_of_the_free_memory(monkeypatch, free: int, kept: bool) -> None:
    """Two batches of 10 bytes each, as a CUDA device would report them."""
    hessian = Hessian(mlp(), F.cross_entropy, rows(), batch_size=12)
    v = torch.ones(1, 79)
    expected = hessian(v)
    hessian._keep, held = None, iter([100, 110])
    monkeypatch.setattr(operator, "_allocated", lambda device: next(held))
    monkeypatch.setattr(operator, "_free", lambda device: free)
    assert torch.equal(hessian(v), expected)
    monkeypatch.setattr(operator, "_allocated", lambda device: 0)
    assert len(hessian._graphs) == (2 if kept else 0)
    hessian.loss_and_gradient()
    assert torch.equal(hessian(v), expected)
    assert len(hessian._graphs) == (2 if kept else 0)
