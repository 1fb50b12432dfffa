"""Gauss-Newton products against dense Jacobians and the loss's Hessian in closed form, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.flatness import GaussNewton, Hessian, density, eigenpairs, hutchpp
from tests.flatness.flat_cases import CASES, cnn, gauss_newton, images, mlp, rows


@pytest.mark.parametrize("case", CASES)
def test_the_products_are_those_of_the_dense_matrix(case: str) -> None:
    model, (x, y) = CASES[case][0](), CASES[case][1]()
    expected = gauss_newton(model, x)
    assert torch.linalg.eigvalsh(expected)[0] > -1e-12
    vectors = torch.randn(3, len(expected), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for keep in (False, True):
        operator = GaussNewton(model, F.cross_entropy, (x, y), dtype=torch.float64, batch_size=4, keep_graphs=keep)
        for _ in range(2):
            assert torch.allclose(operator(vectors), vectors @ expected, rtol=1e-10, atol=1e-12)
        assert (operator.products, operator.samples) == (6, len(y))
    difference = Hessian(model, F.cross_entropy, (x, y), dtype=torch.float64)(vectors) - vectors @ expected
    assert difference.norm() > 1e-3 * expected.norm(), "the Hessian is something else"


def test_eigenvalues_trace_and_density_take_it_as_an_operator() -> None:
    model, (x, y) = mlp(), rows()
    expected = gauss_newton(model, x)
    operator = GaussNewton(model, F.cross_entropy, (x, y), dtype=torch.float64, keep_graphs=True)
    top = eigenpairs(operator, 3, tol=1e-9)
    assert torch.allclose(top.values, torch.linalg.eigvalsh(expected).flip(0)[:3], rtol=1e-8)
    low, high = hutchpp(operator, sketch=top.lanczos, seed=1).interval
    assert low <= float(expected.trace()) <= high
    assert density(operator, starts=1, steps=30).span[0] > -1e-10


def test_for_a_model_linear_in_its_weights_it_is_the_hessian() -> None:
    x, y = rows()
    for loss in (F.cross_entropy, lambda z, t: F.mse_loss(z.sin(), F.one_hot(t, 3).double())):  # the second not convex
        arguments = nn.Linear(5, 3), loss, (x, y)
        matrix = GaussNewton(*arguments, dtype=torch.float64).dense()
        assert torch.allclose(matrix, Hessian(*arguments, dtype=torch.float64).dense(), atol=1e-13)


def test_outputs_may_be_tuples_and_mappings_and_parts_may_be_unused() -> None:
    class Two(nn.Module):
        def __init__(self, kind: type) -> None:
            super().__init__()
            self.body, self.kind, self.unused = mlp(), kind, nn.Linear(2, 2)

        def forward(self, x: Tensor) -> object:
            z = self.body(x)
            one, two, number = z[:, :1], z[:, 1:], torch.arange(3)
            return {"one": one, "two": two, "n": number} if self.kind is dict else (one, (two, number, x))

    def loss(output: object, y: Tensor) -> Tensor:
        one, two = (output["one"], output["two"]) if isinstance(output, dict) else (output[0], output[1][0])
        return F.cross_entropy(torch.cat([one, two], 1), y)

    x, y = rows()
    expected = gauss_newton(mlp(), x)
    for kind in (dict, tuple):
        matrix = GaussNewton(Two(kind), loss, (x, y), dtype=torch.float64, batch_size=10).dense()
        assert torch.allclose(matrix[:79, :79], expected, atol=1e-12)
        assert not matrix[79:].any()
        assert not matrix[:, 79:].any()


def test_blocks_single_precision_and_the_callers_model() -> None:
    model, (x, y) = mlp().train(), rows()
    expected = gauss_newton(model, x)
    block = GaussNewton(model, F.cross_entropy, (x, y), parameters=["2"], dtype=torch.float64).dense()
    assert torch.allclose(block, expected[36:64, 36:64], atol=1e-13)
    single = GaussNewton(model, F.cross_entropy, (x, y)).dense()
    assert single.dtype == torch.float32
    assert (single - expected).norm() < 1e-5 * expected.norm()
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_losses_without_curvature_and_bad_input() -> None:
    x, y = rows()
    flat = GaussNewton(mlp(), lambda z, t: z.mean(), (x, y))
    assert not flat(torch.ones(1, flat.size)).any()
    v = torch.ones(1, 79)
    with pytest.raises(UserError, match="loss: not finite"):
        GaussNewton(mlp(), F.cross_entropy, (x * torch.nan, y))(v)
    with pytest.raises(UserError, match=r"loss: of shape \(23,\), a scalar"):
        GaussNewton(mlp(), lambda a, b: F.cross_entropy(a, b, reduction="none"), (x, y))(v)

    class Text(nn.Linear):
        def forward(self, x: Tensor) -> str:  # type: ignore[override]
            return "no tensor"

    with pytest.raises(UserError, match="model: its output is a str; a tensor"):
        GaussNewton(Text(5, 3), F.cross_entropy, (x, y))(torch.ones(1, 18))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_product() -> None:
    x, y = images()
    expected = gauss_newton(cnn(), x)
    matrix = GaussNewton(cnn().cuda(), F.cross_entropy, (x, y)).dense().cpu()
    assert (matrix - expected).norm() < 1e-5 * expected.norm()
