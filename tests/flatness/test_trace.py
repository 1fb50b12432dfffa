"""Trace estimates: coverage of the stated interval, the stopping rule, the gain of Hutch++."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedman.errors import UserError
from fedman.flatness import Hessian, eigenpairs, hutchinson, hutchpp
from fedman.flatness.trace import student_t
from tests.flatness.flat_cases import CASES, Matrix, dense_case, random_symmetric

BOTH = pytest.mark.parametrize("estimate", [hutchinson, hutchpp])


def after_lanczos(operator, *, seed: int, **options):
    """Hutch++ on what the recurrence of the top eigenvalue has left."""
    return hutchpp(operator, sketch=eigenpairs(operator, seed=seed).lanczos, seed=seed + 1, **options)


@pytest.mark.parametrize("estimate", [hutchinson, hutchpp, after_lanczos])
@pytest.mark.parametrize("decay", [0.3, 1.0])
def test_the_interval_holds_the_trace_in_at_least_95_of_100_seeds(estimate, decay: float) -> None:
    operator = Matrix(random_symmetric(80, 0, decay))
    exact = float(operator.matrix.trace())
    results = [estimate(operator, rtol=0.02, seed=seed) for seed in range(100)]
    assert sum(low <= exact <= high for low, high in (r.interval for r in results)) >= 95
    assert sum(abs(r.value - exact) <= 2 * r.error for r in results) >= 85  # the error is not merely large
    mean = sum(r.value for r in results) / 100
    assert abs(mean - exact) < 4 * math.sqrt(sum(r.error**2 for r in results)) / 100 + 0.005 * abs(exact)


@BOTH
@pytest.mark.parametrize("case", CASES)
def test_networks(estimate, case: str) -> None:
    model, (x, y) = CASES[case][0](), CASES[case][1]()
    exact = float(dense_case(case).trace())
    hessian = Hessian(model, F.cross_entropy, (x, y), dtype=torch.float64, keep_graphs=True)
    result = estimate(hessian, rtol=0.1, seed=1)
    assert result.interval[0] <= exact <= result.interval[1]
    assert result.converged
    assert hessian.products == result.products


@BOTH
def test_the_rule_stops_on_the_relative_error(estimate) -> None:
    operator = Matrix(random_symmetric(80, 0, 0.5))
    coarse, fine = (estimate(operator, rtol=rtol, max_probes=4000) for rtol in (0.2, 0.01))
    assert coarse.converged
    assert fine.converged
    assert coarse.error <= 0.2 * abs(coarse.value)
    assert fine.error <= 0.01 * abs(fine.value)
    assert coarse.probes < fine.probes
    few = estimate(operator, rtol=1e-6, max_probes=21)
    assert (few.probes, few.converged) == (21, False)
    assert estimate(operator, rtol=1e-6, max_probes=21) == few


def test_hutchpp_needs_fewer_products_where_few_eigenvalues_dominate() -> None:
    operator = Matrix(random_symmetric(300, 0, 1.5))
    plain, better = hutchinson(operator, max_probes=20_000), hutchpp(operator, max_probes=20_000)
    assert better.products < plain.products / 2


def test_a_lanczos_basis_is_a_sketch_for_nothing() -> None:
    operator = Matrix(random_symmetric(300, 0, 1.5))
    found = eigenpairs(operator, 10)
    rows = found.lanczos.basis()
    assert len(rows) == found.lanczos.steps
    assert torch.allclose(rows @ rows.T, torch.eye(len(rows), dtype=torch.float64), atol=1e-12)
    assert float((rows @ operator.matrix @ rows.T).trace()) == pytest.approx(sum(found.lanczos.alpha), rel=1e-12)
    before = operator.products
    result = hutchpp(operator, sketch=found.lanczos, seed=1)
    assert operator.products - before == result.products == result.probes
    assert result.products < hutchpp(operator, seed=1).products / 2


def test_a_diagonal_matrix_is_exact_after_the_least_number_of_probes() -> None:
    result = hutchinson(Matrix(torch.arange(5.0).diag()))
    assert (result.value, result.error, result.probes) == (10, 0, 16)
    assert hutchpp(Matrix(torch.arange(5.0).diag())).value == pytest.approx(10)  # fewer parameters than the sketch
    full = hutchpp(Matrix(random_symmetric(20, 0)), sketch=20)
    low, high = full.interval
    assert low - 1e-12 <= float(random_symmetric(20, 0).trace()) <= high + 1e-12


@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    [(0.99, 1, 63.6567), (0.95, 1, 12.7062), (0.99, 2, 9.9248), (0.99, 3, 5.8409), (0.95, 4, 2.7764), (0.99, 5, 4.0321),
     (0.95, 10, 2.2281), (0.99, 7, 3.4995), (0.99, 15, 2.9467), (0.99, 60, 2.6603), (0.95, 1000, 1.9623)],
)  # fmt: skip
def test_students_t(confidence: float, freedom: int, expected: float) -> None:
    assert student_t(confidence, freedom) == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [8, 79])
def test_a_basis_of_the_whole_space_leaves_nothing_but_rounding(size: int, dtype: torch.dtype) -> None:
    """Indefinite matrices, whose trace is small against their eigenvalues."""
    for seed in range(5):
        square = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        operator = Matrix((square + square.T).to(dtype))
        exact, scale = float(operator.matrix.double().trace()), float(operator.matrix.norm(p=2)) * size
        for sketch in (size, eigenpairs(operator, size).lanczos):
            before = operator.products
            result = hutchpp(operator, sketch=sketch, seed=1)
            assert (result.error, result.probes, result.converged) == (0, 0, True)
            assert result.products == operator.products - before
            low, high = result.interval
            assert low <= exact <= high
            assert 0 < high - low <= 33 * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 3, 10])
def test_the_rounding_of_a_matrix_of_low_rank_is_within_the_interval(rank: int, dtype: torch.dtype) -> None:
    for seed in range(20):
        factor = torch.randn(200, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        operator = Matrix((factor @ factor.T).to(dtype))
        low, high = hutchpp(operator, sketch=200, seed=seed).interval
        assert low <= float(operator.matrix.double().trace()) <= high


@pytest.mark.parametrize("case", ["mlp", "cnn"])
def test_in_single_precision_a_networks_exact_trace_is_within_its_rounding(case: str) -> None:
    model, (x, y) = CASES[case][0](), CASES[case][1]()
    hessian = Hessian(model, F.cross_entropy, (x, y), keep_graphs=True)
    low, high = hutchpp(hessian, sketch=hessian.size).interval
    assert low <= float(dense_case(case).trace()) <= high
    assert high - low < 1e-4 * high


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_probes": 3}, "max_probes: 3, at least 16"),
        ({"rtol": 0.0}, "rtol: 0.0"),
        ({"sketch": 10}, "sketch: 10 vectors; 0 to 9"),
    ],
)
def test_bad_input_is_one_line(arguments: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        hutchpp(Matrix(random_symmetric(9, 0)), **({"sketch": 3} | arguments))
    assert message in str(error.value)
