"""Spectral densities: quadrature exact for moments, close to the smoothed histogram of all eigenvalues."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedman.errors import UserError
from fedman.flatness import Hessian, density
from fedman.flatness.operator import random_signs
from tests.flatness.flat_cases import CASES, Matrix, dense_case, random_symmetric


def test_moments_of_a_start_are_exact_up_to_twice_the_steps() -> None:
    operator = Matrix(random_symmetric(60, 0))
    result = density(operator, starts=3, steps=5, seed=4)
    starts = random_signs(operator, 3, torch.Generator().manual_seed(4))
    power, expected = starts.clone(), []
    for _ in range(10):
        expected.append((starts * power).sum(-1).mean() / 60)
        power = operator(power)
    assert torch.allclose(result.moments(10)[0], torch.stack(expected), rtol=1e-10)
    assert result.products == 15


@pytest.mark.parametrize("case", CASES)
def test_moments_match_the_dense_hessian(case: str) -> None:
    model, (x, y) = CASES[case][0](), CASES[case][1]()
    matrix = dense_case(case)
    hessian = Hessian(model, F.cross_entropy, (x, y), dtype=torch.float64, keep_graphs=True)
    result = density(hessian, starts=30, steps=8)
    mean, error = result.moments(5)
    expected = torch.stack([torch.linalg.matrix_power(matrix, j).trace() / len(matrix) for j in range(5)])
    assert ((mean - expected).abs() <= 3.5 * error + 1e-12).all()
    assert (error[1:] < 0.5 * mean[1:].abs()).all()
    assert hessian.products == result.products


def test_the_curve_is_the_smoothed_spectrum_within_its_band() -> None:
    operator = Matrix(random_symmetric(100, 1, 0.5))
    result = density(operator, starts=40, steps=60)
    curve = result.curve(sigma=0.5)
    values = torch.linalg.eigvalsh(operator.matrix)
    exact = torch.exp(-0.5 * ((curve.grid - values[:, None]) / 0.5) ** 2).mean(0) / (0.5 * math.sqrt(2 * math.pi))
    step = curve.grid[1] - curve.grid[0]
    assert abs(float(curve.mean.sum() * step) - 1) < 1e-3
    inside = ((curve.mean - exact).abs() <= 3 * curve.error + 1e-3).double().mean()
    assert inside > 0.97
    assert (curve.mean - exact).abs().max() < 0.1 * exact.max()


def test_the_default_width_is_pyhessians_and_a_grid_may_be_given() -> None:
    result = density(Matrix(random_symmetric(50, 0)), starts=2, steps=20)
    low, high = result.span
    assert result.curve().sigma == pytest.approx(math.sqrt(1e-5 * (high - low)))
    grid = torch.linspace(-1, 1, 7, dtype=torch.float64)
    assert torch.equal(result.curve(grid=grid).grid, grid)


def test_a_start_in_an_invariant_subspace_stops_early() -> None:
    result = density(Matrix(2 * torch.eye(6, dtype=torch.float64)), starts=1, steps=6)
    assert result.products == 1
    assert result.moments(3)[0].tolist() == pytest.approx([1, 2, 4])
    assert result.moments(3)[1].isnan().all()


@pytest.mark.parametrize(
    ("arguments", "message"), [({"starts": 0}, "starts: 0, at least 1"), ({"steps": 0}, "steps: 0, at least 1")]
)
def test_bad_input_is_one_line(arguments: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        density(Matrix(torch.eye(3)), **arguments)
    assert message in str(error.value)
    with pytest.raises(UserError, match="sigma: 0 is not"):
        density(Matrix(torch.eye(3))).curve(sigma=0)
