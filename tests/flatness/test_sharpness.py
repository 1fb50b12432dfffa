"""Sharpness against closed forms of linear and quadratic losses and brute force on two parameters, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.flatness import Ascent, LossAt, average_sharpness, m_sharpness, worst_case_sharpness
from tests.flatness.flat_cases import cnn, images, mlp, rows

DOUBLE = {"dtype": torch.float64}
ADAPTIVE = pytest.mark.parametrize("adaptive", [True, False])
NORMS = pytest.mark.parametrize("p", [2, math.inf])


def linear(size: int = 5) -> nn.Linear:
    """One output, no bias, weights of both signs and one zero."""
    model = nn.Linear(size, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1.5, size).roll(2))
        model.weight[0, 0] = 0
    return model


def regression(size: int = 5, n: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(n, size, generator=generator), torch.randn(n, 1, generator=generator)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) / 2


def quadratic(adaptive: bool) -> tuple[nn.Linear, tuple[Tensor, Tensor], Tensor, Tensor]:
    """A least-squares problem as ½εᵀAε + bᵀε + L(w) in ε = δ/c: its model, data, A and b."""
    model, (x, y) = linear(), regression()
    w, rest = model.weight[0].double(), x.double()
    gradient = rest.T @ (rest @ w[:, None] - y.double())[:, 0] / len(y)
    c = w.detach().abs() if adaptive else torch.ones(5, dtype=torch.float64)
    return model, (x, y), c[:, None] * (rest.T @ rest / len(y)) * c, (c * gradient).detach()


def largest_on_a_ball(a: Tensor, b: Tensor, rho: float) -> float:
    """max ½εᵀAε + bᵀε over ‖ε‖ = ρ: (λI − A)ε = b for the λ > λ_max(A) at which ε is that long."""
    values, vectors = torch.linalg.eigh(a)
    parts = vectors.T @ b
    low, high = float(values[-1]), float(values[-1] + b.norm() / rho)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((parts / (middle - values)).norm()) > rho else (low, middle)
    epsilon = vectors @ (parts / (high - values))
    return float(epsilon @ a @ epsilon / 2 + b @ epsilon)


@ADAPTIVE
def test_the_average_on_a_quadratic_is_half_rho_squared_times_the_trace(adaptive: bool) -> None:
    model, data, a, _ = quadratic(adaptive)
    found = average_sharpness(model, squared, data, rho=0.3, adaptive=adaptive, pairs=500, **DOUBLE)
    assert abs(found.value - 0.3**2 * float(a.trace()) / 2) < 4 * found.error
    assert found.error < 0.08 * found.value
    generator = torch.Generator().manual_seed(0)
    draws = 0.3 * torch.stack([torch.randn(5, generator=generator).double() for _ in range(500)])
    by_hand = torch.einsum("ni,ij,nj->n", draws, a, draws) / 2  # ±δ cancel the gradient's part
    assert found.value == pytest.approx(float(by_hand.mean()), rel=1e-10)
    assert found.error == pytest.approx(float(by_hand.std()) / math.sqrt(500), rel=1e-10)


@ADAPTIVE
@NORMS
def test_the_worst_case_of_a_linear_loss_is_the_dual_norm(adaptive: bool, p: float) -> None:
    model, (x, y) = linear(), regression()
    c = model.weight[0].detach().double().abs() if adaptive else torch.ones(5, dtype=torch.float64)
    gradient = c * x.double().mean(0)
    expected = 0.2 * float(gradient.norm(p=2 if p == 2 else 1))
    ascent = Ascent(0.2, p, adaptive, steps=1, restarts=0)
    found = worst_case_sharpness(model, lambda z, t: z.mean(), (x, y), ascent, batch_size=5, **DOUBLE)
    assert found.value == pytest.approx(expected, rel=1e-12)
    moved = found.delta[c > 0] / c[c > 0]
    assert float(moved.norm(p=p)) == pytest.approx(0.2, rel=1e-12)
    assert not found.delta[c == 0].any()


@ADAPTIVE
@NORMS
def test_one_sample_of_logistic_regression_is_known_exactly_and_groups_of_one_too(adaptive: bool, p: float) -> None:
    """log(1 + exp(−y wᵀx)) rises by moving the margin alone, by at most ρ times the dual norm of c⊙x."""
    model, (x, y) = linear(), regression()
    y = (y > 0).double() * 2 - 1
    w = model.weight[0].detach().double()
    c = w.abs() if adaptive else torch.ones(5, dtype=torch.float64)
    reach = 0.3 * (c * x.double()).norm(p=2 if p == 2 else 1, dim=1)
    margins = (x.double() @ w) * y[:, 0]
    expected = F.softplus(reach - margins) - F.softplus(-margins)
    ascent = Ascent(0.3, p, adaptive)

    def logistic(output: Tensor, target: Tensor) -> Tensor:
        return F.softplus(-output * target).mean()

    each = m_sharpness(model, logistic, (x, y), ascent, m=1, **DOUBLE)
    assert torch.allclose(each.groups, expected, rtol=1e-12)
    assert each.value == pytest.approx(float(expected.mean()), rel=1e-12)
    one = worst_case_sharpness(model, logistic, (x[:1], y[:1]), ascent, **DOUBLE)
    assert one.value == pytest.approx(float(expected[0]), rel=1e-12)


@ADAPTIVE
def test_the_worst_case_of_a_quadratic_on_a_ball(adaptive: bool) -> None:
    model, data, a, b = quadratic(adaptive)
    for rho in (0.05, 0.5, 5.0):
        ascent = Ascent(rho, 2, adaptive, steps=100, restarts=0)
        found = worst_case_sharpness(model, squared, data, ascent, **DOUBLE).value
        assert found == pytest.approx(largest_on_a_ball(a, b, rho), rel=1e-5)
        quick = worst_case_sharpness(model, squared, data, Ascent(rho, 2, adaptive), **DOUBLE).value
        assert 0.98 * found < quick <= found * (1 + 1e-12)


@ADAPTIVE
def test_the_worst_case_of_a_quadratic_on_a_cube_is_a_corner(adaptive: bool) -> None:
    model, data, a, b = quadratic(adaptive)
    corners = 0.5 * torch.tensor(list(itertools.product([-1.0, 1.0], repeat=5)), dtype=torch.float64)
    expected = float((torch.einsum("ni,ij,nj->n", corners, a, corners) / 2 + corners @ b).max())
    ascent = Ascent(0.5, math.inf, adaptive, restarts=8)
    found = worst_case_sharpness(model, squared, data, ascent, **DOUBLE)
    assert found.value == pytest.approx(expected, rel=1e-12)


def test_at_a_minimum_restarts_find_the_largest_eigenvalue() -> None:
    """The gradient at the start is zero; the worst case is ½ρ² λ_max."""
    model, (x, y) = linear(), regression()
    nn.init.zeros_(model.weight)
    data = x, 0 * y
    top = float(torch.linalg.eigvalsh(x.double().T @ x.double() / len(x))[-1])
    flat = worst_case_sharpness(model, squared, data, Ascent(0.1, adaptive=False, restarts=0), **DOUBLE)
    assert (flat.value, flat.delta.any()) == (0, False)
    found = worst_case_sharpness(model, squared, data, Ascent(0.1, adaptive=False, steps=100), **DOUBLE)
    assert found.value == pytest.approx(0.1**2 * top / 2, rel=1e-5)


class TwoNumbers(nn.Module):
    """b·tanh(a·x): two parameters, so that every perturbation can be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.75)), nn.Parameter(torch.tensor(-1.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.b * torch.tanh(self.a * x)


CENTRE = torch.tensor([0.75, -1.25], dtype=torch.float64)


def rises(delta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """How much moves `[n, 2]` of the two numbers raise the mean squared error."""

    def losses(w: Tensor) -> Tensor:
        return (w[:, 1:] * torch.tanh(w[:, :1] * x[:, 0].double()) - y[:, 0].double()).square().mean(1)

    return losses(CENTRE + delta) - losses(CENTRE[None])


@ADAPTIVE
@NORMS
def test_every_perturbation_of_two_numbers(adaptive: bool, p: float) -> None:
    x, y = regression(1)
    c = CENTRE.abs() if adaptive else torch.ones(2, dtype=torch.float64)
    axis = torch.linspace(-1, 1, 401, dtype=torch.float64)
    square = torch.cartesian_prod(axis, axis)
    turns = 2 * math.pi * axis
    disc = torch.cat([r * torch.stack([turns.cos(), turns.sin()], 1) for r in axis[200::20]])
    for rho in (0.1, 0.8, 3.0):
        expected = float(rises(rho * (disc if p == 2 else square) * c, x, y).max())
        found = worst_case_sharpness(TwoNumbers(), F.mse_loss, (x, y), Ascent(rho, p, adaptive, restarts=4), **DOUBLE)
        assert float(rises(found.delta[None], x, y)) == pytest.approx(found.value, rel=1e-10)
        assert float((found.delta / c).norm(p=p)) <= rho * (1 + 1e-12)
        assert found.value == pytest.approx(expected, rel=2e-3)


@ADAPTIVE
def test_the_average_over_two_numbers_is_the_integral(adaptive: bool) -> None:
    x, _ = regression(1)
    y = -x.tanh()
    scale = 0.4 * (CENTRE.abs() if adaptive else torch.ones(2, dtype=torch.float64))
    axis = torch.linspace(-7, 7, 281, dtype=torch.float64)
    weight = (-axis.square() / 2).exp()
    grid = torch.cartesian_prod(axis, axis)
    weights = (weight[:, None] * weight).flatten() / weight.sum() ** 2
    expected = float(weights @ rises(scale * grid, x, y))
    found = average_sharpness(TwoNumbers(), F.mse_loss, (x, y), rho=0.4, adaptive=adaptive, pairs=1000, **DOUBLE)
    assert abs(found.value - expected) < 4 * found.error
    assert found.error < 0.1 * expected


def test_groups_of_all_samples_are_the_worst_case_and_smaller_ones_are_worse() -> None:
    model, (x, y) = mlp(), rows()
    ascent = Ascent(0.3, restarts=0)
    whole = worst_case_sharpness(model, F.cross_entropy, (x, y), ascent, **DOUBLE)
    assert m_sharpness(model, F.cross_entropy, (x, y), ascent, m=23, **DOUBLE).value == whole.value
    few = m_sharpness(model, F.cross_entropy, (x, y), ascent, m=10, **DOUBLE)
    parts = [slice(0, 10), slice(10, 20), slice(20, 23)]
    each = [worst_case_sharpness(model, F.cross_entropy, (x[s], y[s]), ascent, **DOUBLE).value for s in parts]
    assert few.groups.tolist() == each
    assert few.value == pytest.approx((10 * each[0] + 10 * each[1] + 3 * each[2]) / 23, rel=1e-12)
    assert whole.value < few.value < m_sharpness(model, F.cross_entropy, (x, y), ascent, m=1, **DOUBLE).value
    loader = [(x[s], y[s]) for s in parts]
    assert m_sharpness(model, F.cross_entropy, loader, ascent, m=10, **DOUBLE).value == few.value


def test_rescaled_relu_layers_are_as_sharp_if_adaptive() -> None:
    """Ten times the first layer and a tenth of the second are the same function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)).double()
    scaled = nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)).double()
    with torch.no_grad():
        scaled[0].weight.copy_(10 * model[0].weight)
        scaled[2].weight.copy_(model[2].weight / 10)
    for adaptive in (True, False):
        values = [
            [
                average_sharpness(net, F.cross_entropy, rows(), rho=0.2, adaptive=adaptive, pairs=9, **DOUBLE).value,
                *(
                    worst_case_sharpness(net, F.cross_entropy, rows(), Ascent(0.2, p, adaptive), **DOUBLE).value
                    for p in (2, math.inf)
                ),
            ]
            for net in (model, scaled)
        ]
        for plain, moved in zip(*values, strict=True):
            assert (moved == pytest.approx(plain, rel=1e-6)) is adaptive


def test_batches_seeds_blocks_and_the_callers_model() -> None:
    model, (x, y) = mlp().train(), rows()
    before = [p.clone() for p in model.parameters()]

    def average(**options: object) -> float:
        return average_sharpness(model, F.cross_entropy, (x, y), rho=0.2, pairs=5, **options).value

    def worst(seed: int = 0, restarts: int = 1, **options: object) -> Tensor:
        ascent = Ascent(0.2, seed=seed, restarts=restarts, steps=5)
        return worst_case_sharpness(model, F.cross_entropy, (x, y), ascent, **options).delta

    assert average() == average()
    assert average() != average(seed=1)
    assert average(batch_size=4, **DOUBLE) == pytest.approx(average(**DOUBLE), rel=1e-12)
    assert average() == pytest.approx(average(**DOUBLE), rel=1e-4)
    assert torch.equal(worst(), worst())
    assert torch.allclose(worst(batch_size=4, **DOUBLE), worst(**DOUBLE), rtol=1e-9)
    last = worst(parameters=["4"])
    assert last.shape == (15,)
    assert average(parameters=["4"]) < average()
    assert LossAt(model, F.cross_entropy, (x, y), limit=7).samples == 7
    assert model.training
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(model.parameters(), before, strict=True))


def test_the_loss_at_other_weights_is_that_of_a_moved_model() -> None:
    model, (x, y) = cnn(), images()
    loss_at = LossAt(model, F.cross_entropy, (x, y), batch_size=4, **DOUBLE)
    w = loss_at.centre + 0.1
    nn.utils.vector_to_parameters(w, model.double().parameters())
    loss = F.cross_entropy(model(x.double()), y)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    value, gradient = loss_at.with_gradient(w)
    assert value == loss_at(w) == pytest.approx(loss.item(), rel=1e-12)
    assert torch.allclose(gradient, expected, atol=1e-12)
    assert not gradient.requires_grad


def test_progress() -> None:
    seen: list[tuple[int, int]] = []
    average_sharpness(mlp(), F.cross_entropy, rows(), rho=0.1, pairs=3, progress=lambda *a: seen.append(a))
    m_sharpness(mlp(), F.cross_entropy, rows(), Ascent(0.1, steps=1), m=12, progress=lambda *a: seen.append(a))
    assert seen == [(1, 3), (2, 3), (3, 3), (1, 2), (2, 2)]


def test_bad_input_is_one_line() -> None:
    model, (x, y) = mlp(), rows()
    arguments = model, F.cross_entropy, (x, y)
    broken = model, F.cross_entropy, (x * math.nan, y)
    for call, message in (
        (lambda: average_sharpness(*arguments, rho=0.0), r"rho: 0\.0 is not a positive number"),
        (lambda: average_sharpness(*arguments, rho=0.1, pairs=1), "pairs: 1, at least 2"),
        (lambda: average_sharpness(*arguments, rho=1e38), r"rho: 1e\+38; the loss at a perturbed model"),
        (lambda: average_sharpness(*arguments, rho=0.1, dtype=torch.float16), "dtype: torch.float16"),
        (lambda: average_sharpness(*broken, rho=0.1), "loss: nan at the model itself"),
        (lambda: worst_case_sharpness(*arguments, Ascent(math.nan)), "rho: nan is not a positive number"),
        (lambda: worst_case_sharpness(*arguments, Ascent(1e38)), r"rho: 1e\+38; loss or gradient is not finite"),
        (lambda: worst_case_sharpness(*broken, Ascent(0.1)), "loss: nan at the model itself"),
        (lambda: worst_case_sharpness(model, lambda z, t: z, (x, y), Ascent(0.1)), r"loss: of shape \(23, 3\)"),
        (lambda: Ascent(0.1, 1), "p: 1; 2 and inf are allowed"),
        (lambda: Ascent(0.1, steps=0), "steps: 0, at least 1"),
        (lambda: Ascent(0.1, restarts=-1), "restarts: -1, at least 0"),
        (lambda: m_sharpness(*arguments, Ascent(0.1), m=0), "m: 0, at least 1"),
        (lambda: m_sharpness(model, F.cross_entropy, [(x[:5], y[:5]), (x, y)], Ascent(0.1), m=9), "m: 9; .* holds 5"),
    ):
        with pytest.raises(UserError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_sharpness() -> None:
    for measure in (
        lambda net: average_sharpness(net, F.cross_entropy, images(), rho=0.2, pairs=5, **DOUBLE),
        lambda net: worst_case_sharpness(net, F.cross_entropy, images(), Ascent(0.2), **DOUBLE),
        lambda net: m_sharpness(net, F.cross_entropy, images(), Ascent(0.002, math.inf), m=4, **DOUBLE),
    ):
        assert measure(cnn().cuda()).value == pytest.approx(measure(cnn()).value, rel=1e-6)
