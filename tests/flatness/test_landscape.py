"""Landscapes against models evaluated one by one; filter normalisation; bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.flatness import Hessian, eigenpairs, filter_normalise, landscape, random_direction
from tests.flatness.flat_cases import CASES, cnn, mlp, rows


@torch.no_grad()
def loss_at(model: nn.Module, w: Tensor, x: Tensor, y: Tensor) -> float:
    model = model.double()
    torch.nn.utils.vector_to_parameters(w, model.parameters())
    return float(F.cross_entropy(model.eval()(x.double() if x.is_floating_point() else x), y))


def weight(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


@pytest.mark.parametrize("case", CASES)
def test_a_surface_holds_the_losses_of_the_moved_models(case: str) -> None:
    model, (x, y) = CASES[case][0](), CASES[case][1]()
    d, e = (random_direction(model, seed).double() for seed in (1, 2))
    result = landscape(model, F.cross_entropy, (x, y), [d, e], points=3, span=0.5, dtype=torch.float64, batch_size=4)
    assert result.offsets.tolist() == [-0.5, 0, 0.5]
    for i, a in enumerate(result.offsets):
        for j, b in enumerate(result.offsets):
            expected = loss_at(CASES[case][0](), weight(model) + a * d + b * e, x, y)
            assert float(result.losses[i, j]) == pytest.approx(expected, rel=1e-10)
    assert result.samples == len(y)


def test_along_an_eigenvector_the_curvature_is_the_eigenvalue() -> None:
    model, data = mlp(), rows()
    pairs = eigenpairs(Hessian(model, F.cross_entropy, data, dtype=torch.float64), 1, tol=1e-9)
    losses = landscape(
        model, F.cross_entropy, data, [pairs.vectors[0]], points=3, span=1e-3, dtype=torch.float64
    ).losses
    assert float(losses[0] - 2 * losses[1] + losses[2]) / 1e-6 == pytest.approx(float(pairs.values[0]), rel=1e-3)


def test_random_directions_have_the_filters_norms_and_share_their_numbers() -> None:
    model, scaled = cnn(), cnn()
    with torch.no_grad():
        scaled[0].weight[1] *= 3
    d, same, other, big = (random_direction(*a) for a in ((model, 1), (model, 1), (model, 2), (scaled, 1)))
    assert torch.equal(d, same)
    assert not torch.equal(d, other)
    conv = d[:18].reshape(2, 9)
    assert torch.allclose(conv.norm(dim=1), model[0].weight.detach().flatten(1).norm(dim=1))
    assert not d[18:20].any()
    assert torch.allclose(big[9:18], 3 * d[9:18])
    assert torch.allclose(big[:9], d[:9])
    assert torch.allclose(filter_normalise(model, 5 * d), d, atol=1e-6)


def test_bad_input_is_one_line() -> None:
    model, data = mlp(), rows()
    d = random_direction(model, 0)
    for directions, options, message in (
        ([], {}, "directions: 0 given"),
        ([d, d, d], {}, "directions: 3 given"),
        ([d[:3]], {}, r"directions: one is of shape \(3,\), \[79\]"),
        ([d], {"points": 1}, "points, span: 1, 1.0"),
        ([d], {"span": 0.0}, r"points, span: 41, 0\.0"),
    ):
        with pytest.raises(UserError, match=message):
            landscape(model, F.cross_entropy, data, directions, **options)
