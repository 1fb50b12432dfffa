"""Eigenpairs against torch.linalg.eigh of dense matrices in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedman.errors import UserError
from fedman.flatness import Hessian, eigenpairs
from tests.flatness.flat_cases import CASES, Matrix, dense_case, random_symmetric


@pytest.mark.parametrize("case", CASES)
def test_the_top_of_a_networks_hessian(case: str) -> None:
    model, (x, y) = CASES[case][0](), CASES[case][1]()
    expected = torch.linalg.eigvalsh(dense_case(case)).flip(0)[:5]
    hessian = Hessian(model, F.cross_entropy, (x, y), dtype=torch.float64, keep_graphs=True)
    pairs = eigenpairs(hessian, 5, tol=1e-9)
    assert torch.allclose(pairs.values, expected, rtol=1e-6, atol=0)
    assert pairs.converged.all()
    assert hessian.products == pairs.products
    assert pairs.check(hessian).max() < 1e-8 * expected[0]


@pytest.mark.parametrize("seed", range(4))
def test_residuals_of_the_recurrence_are_the_true_ones(seed: int) -> None:
    operator = Matrix(random_symmetric(150, seed))
    pairs = eigenpairs(operator, 6, tol=1e-12, max_steps=20)
    assert pairs.products == operator.products == 20
    assert torch.allclose(pairs.residuals, pairs.check(operator), rtol=1e-6, atol=1e-12)
    assert not pairs.converged.all()
    every = torch.linalg.eigvalsh(operator.matrix)
    nearest = (every - pairs.values[:, None]).abs().min(1).values
    assert (nearest <= pairs.residuals + 1e-12).all()


@pytest.mark.parametrize("k", [1, 20])
def test_ends_of_the_spectrum(k: int) -> None:
    matrix = random_symmetric(200, 1)
    every = torch.linalg.eigvalsh(matrix)
    top = eigenpairs(Matrix(matrix), k, tol=1e-9)
    both = eigenpairs(Matrix(matrix), k, tol=1e-9, ends="both")
    assert torch.allclose(top.values, every.flip(0)[:k], rtol=1e-6)
    assert torch.allclose(both.values, torch.cat([top.values, every[:k].flip(0)]), rtol=1e-6)
    assert torch.allclose(both.vectors @ both.vectors.T, torch.eye(2 * k, dtype=torch.float64), atol=1e-9)


def test_the_rule_stops_early_and_the_seed_repeats() -> None:
    matrix = random_symmetric(300, 2)
    loose, tight = (eigenpairs(Matrix(matrix), 3, tol=tol) for tol in (1e-2, 1e-8))
    assert loose.products < tight.products < 100
    assert loose.residuals.max() <= 1e-2 * matrix.norm(p=2)
    again = eigenpairs(Matrix(matrix), 3, tol=1e-2)
    assert torch.equal(again.vectors, loose.vectors)
    other = eigenpairs(Matrix(matrix), 3, tol=1e-8, seed=9)
    assert torch.allclose(other.values, tight.values, rtol=1e-9)


def test_an_invariant_subspace_is_left_for_more() -> None:
    matrix = torch.diag(torch.tensor([3.0, 3.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    assert torch.allclose(eigenpairs(Matrix(matrix), 6).values, matrix.diagonal(), atol=1e-12)
    assert eigenpairs(Matrix(torch.zeros(4, 4)), 2).values.tolist() == [0, 0]
    assert eigenpairs(Matrix(torch.tensor([[2.0]])), 1).values.tolist() == [2]


TAIL = torch.linspace(3, 0, 60, dtype=torch.float64)
REPEATED = {
    "threefold": torch.cat([torch.tensor([5.0, 5, 5, 4]), TAIL]),
    "few distinct": torch.tensor([5.0, 5, 5, 4, 4, 4, 4] + 93 * [0.0]),
    "all twofold": (6 * torch.arange(1, 51) ** -0.8).outer(torch.tensor([1.0, 1, -1, -1])).flatten(),
    "both ends": torch.cat([torch.tensor([5.0, 5, 5, 4]), TAIL / 3, torch.tensor([-6.0, -6, -6])]),
    "one": torch.ones(30),
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("ends", ["top", "both"])
@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-9])
def test_repeated_eigenvalues_are_found_by_multiplicity(name: str, ends: str, tol: float) -> None:
    values = REPEATED[name].double().sort(descending=True).values
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    expected = values[:4] if ends == "top" else torch.cat([values[:4], values[-4:]])
    for seed, dtype in ((0, torch.float64), (1, torch.float64), (2, torch.float32)):
        if dtype == torch.float32 and tol < 1e-6:
            continue
        operator = Matrix((basis @ values.diag() @ basis.T).to(dtype))
        pairs = eigenpairs(operator, 4, ends=ends, tol=tol, seed=seed)
        assert (pairs.values - expected).abs().max() <= 2 * max(tol, 1e-6) * values.abs().max()
        assert pairs.converged.all()
        assert pairs.products == operator.products
        assert pairs.check(operator).max() <= 1.5 * max(tol, 1e-6) * values.abs().max()
        gram = pairs.vectors @ pairs.vectors.T
        assert torch.allclose(gram, torch.eye(len(gram), dtype=dtype), atol=1e-5)


def test_nothing_is_called_converged_before_copies_are_excluded() -> None:
    """The recurrence alone gives 5, 5, 4, 3 with small residuals; only the first can be trusted without more."""
    matrix = REPEATED["threefold"].double().diag()
    alone = eigenpairs(Matrix(matrix), 4, max_steps=39)
    assert torch.allclose(alone.values, torch.tensor([5.0, 5, 4, 3], dtype=torch.float64), atol=1e-3)
    assert alone.residuals.max() <= 5e-4
    assert alone.converged.tolist() == [True, False, False, False]
    both = eigenpairs(Matrix(matrix), 2, ends="both", max_steps=39)
    assert both.residuals.max() <= 5e-4
    assert both.converged.tolist() == [True, False, False, True]
    enough = eigenpairs(Matrix(matrix), 4, max_steps=200)
    assert torch.allclose(enough.values, matrix.diagonal()[:4], atol=1e-6)
    assert enough.converged.all()
    assert enough.products <= 200


def test_a_single_eigenvalue_needs_no_search_for_copies() -> None:
    for ends in ("top", "both"):
        pairs = eigenpairs(Matrix(REPEATED["threefold"].double().diag()), 1, ends=ends)
        assert pairs.products == pairs.lanczos.steps
        assert pairs.converged.all()


def test_single_precision_keeps_an_orthonormal_basis() -> None:
    matrix = random_symmetric(400, 3, decay=0.7)
    pairs = eigenpairs(Matrix(matrix.float()), 20)
    assert pairs.converged.all()
    assert torch.allclose(pairs.values, torch.linalg.eigvalsh(matrix).flip(0)[:20], rtol=1e-4)
    assert torch.allclose(pairs.vectors @ pairs.vectors.T, torch.eye(20), atol=1e-5)


def test_progress_counts_products() -> None:
    seen: list[tuple[int, int]] = []
    pairs = eigenpairs(Matrix(random_symmetric(50, 0)), 1, progress=lambda *a: seen.append(a))
    assert seen == [(i + 1, 50) for i in range(pairs.products)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k: 0 eigenvalues of a 9x9 matrix; 1 to 9"),
        ({"k": 10}, "k: 10 eigenvalues of a 9x9 matrix; 1 to 9"),
        ({"k": 5, "ends": "both"}, "k: 5 eigenvalues of a 9x9 matrix; 1 to 4"),
        ({"k": 1, "ends": "middle"}, "ends: 'middle'"),
        ({"k": 4, "max_steps": 3}, "max_steps: 3"),
    ],
)
def test_bad_input_is_one_line(arguments: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        eigenpairs(Matrix(random_symmetric(9, 0)), **arguments)
    assert message in str(error.value)


def test_a_small_residual_alone_does_not_stop_the_search() -> None:
    """Late eigenvalues push the last of the wanted ones up: the values must have settled."""
    values = 6 * torch.arange(1, 2001, dtype=torch.float64) ** -0.8
    for seed in range(3):
        pairs = eigenpairs(Matrix(values.diag()), 20, tol=1e-2, seed=seed)
        assert (pairs.values - values[:20]).abs().max() <= 1e-2 * values[0]
