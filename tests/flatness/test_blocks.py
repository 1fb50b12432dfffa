"""Layer blocks and clients against dense Hessians."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedman.errors import UserError
from fedman.flatness import client_eigenvalues, density, eigenpairs, hutchinson, layer_hessians, layers
from tests.flatness.flat_cases import CASES, dense, dense_case, mlp, rows


@pytest.mark.parametrize("case", ["mlp", "cnn"])
def test_each_layer_is_a_diagonal_block(case: str) -> None:
    model, (x, y) = CASES[case][0](), CASES[case][1]()
    matrix, start = dense_case(case), 0
    for _, hessian in layer_hessians(model, F.cross_entropy, (x, y), dtype=torch.float64, keep_graphs=True):
        part = slice(start, start + hessian.size)
        block, start = matrix[part, part], start + hessian.size
        assert torch.allclose(hessian.dense(), block, atol=1e-12)
        assert torch.allclose(
            eigenpairs(hessian, 2, tol=1e-9).values, torch.linalg.eigvalsh(block).flip(0)[:2], rtol=1e-6, atol=1e-12
        )
        low, high = hutchinson(hessian, rtol=0.05).interval
        assert low <= float(block.trace()) <= high
        mean, error = density(hessian, starts=100, steps=3).moments(3)
        exact = torch.stack([torch.linalg.matrix_power(block, j).trace() / len(block) for j in range(3)])
        assert ((mean - exact).abs() <= 3.5 * error + 1e-12).all()
    assert start == len(matrix)


def test_layers_are_the_modules_that_own_parameters() -> None:
    assert layers(mlp()) == {n: [f"{n}.weight", f"{n}.bias"] for n in ("0", "2", "4")}


def test_the_mean_of_clients_bounds_the_eigenvalue_of_the_mean() -> None:
    model, (x, y) = mlp(), rows()
    parts = [slice(0, 4), slice(4, 15), slice(15, 23)]
    matrices = [dense(model, x[p], y[p]) for p in parts]
    clients = [(x[p], y[p]) for p in parts]
    bound = client_eigenvalues(model, F.cross_entropy, clients, dtype=torch.float64, tol=1e-9)
    tops = torch.stack([torch.linalg.eigvalsh(m)[-1] for m in matrices])
    assert bound.clients == pytest.approx(tops.tolist(), rel=1e-8)
    assert bound.mean == pytest.approx(float(tops.mean()), rel=1e-8)
    assert bound.top == pytest.approx(float(torch.linalg.eigvalsh(sum(matrices) / 3)[-1]), rel=1e-8)
    assert bound.top < bound.mean
    assert bound.residual < 1e-8


def test_no_clients_are_refused() -> None:
    with pytest.raises(UserError, match="clients: none given"):
        client_eigenvalues(mlp(), F.cross_entropy, [])
