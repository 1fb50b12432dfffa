"""The paper's identities and bounds on small nets; a broken assumption must show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedman.errors import UserError
from fedman.flatness.theory import Bound, gershgorin, layer_check
from tests.flatness.flat_cases import CASES, dense, images, mlp, rows


@pytest.mark.parametrize("name", ["0", "2", "4"])
def test_a_linear_layers_hessian_is_the_sum_of_kronecker_products(name: str) -> None:
    check = layer_check(mlp(), F.cross_entropy, *rows(), name)
    assert check.identity < 1e-12
    assert check.approximation < 1e-12
    (bound,) = check.bounds
    assert bound.holds
    assert 0.05 < bound.left / bound.right <= 1


def test_the_linear_bound_by_hand() -> None:
    """One layer, squared loss: M = 2I, so H = 2·mean(a aᵀ) ⊗ I and the bound is 2·mean‖a‖²."""
    x, _ = rows()
    model = nn.Linear(5, 3, bias=False)

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out - y).square().sum(-1).mean()

    check = layer_check(nn.Sequential(model), loss, x, torch.zeros(len(x), 3), "0")
    gram = x.double().T @ x.double() / len(x)
    assert check.bounds[0].left == pytest.approx(2 * float(torch.linalg.eigvalsh(gram)[-1]))
    assert check.bounds[0].right == pytest.approx(2 * float(gram.trace()))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
def test_a_convolutions_hessian_bounds_and_approximation(stride: int, padding: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 2, 3, stride=stride, padding=padding)
    positions = conv(images()[0]).shape[-1] ** 2
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(2 * positions, 3))
    check = layer_check(model, F.cross_entropy, *images(4), "0")
    assert check.identity < 1e-12
    assert check.approximation > 0.01
    spectral, patches, pixels = check.bounds
    assert all(b.holds for b in check.bounds)
    assert spectral.right <= patches.right <= pixels.right
    x, y = images(4)
    assert spectral.left == pytest.approx(float(torch.linalg.eigvalsh(dense(model, x, y)[:18, :18])[-1]))


def test_one_kronecker_product_is_no_bound() -> None:
    """The mean over 16 positions of a convolution on constant images: too small by 16, the patch bound holds."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    check = layer_check(model, F.cross_entropy, torch.ones(2, 1, 6, 6), torch.tensor([0, 1]), "0")
    assert check.one_product is not None
    assert not check.one_product.holds
    assert check.one_product.left / check.one_product.right == pytest.approx(16)
    assert all(b.holds for b in check.bounds)
    assert check.constant == pytest.approx(check.bounds[2].right / (9 * 36))  # k² = 9 and ‖a‖² = 36


def test_a_kernel_that_covers_the_image_is_a_linear_layer() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten())
    check = layer_check(model, F.cross_entropy, *images(5), "0")
    assert check.approximation < 1e-12
    assert check.one_product is None
    (bound,) = check.bounds
    assert bound.holds


def test_samples_that_see_each_other_break_the_identity() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.fc(x)
            return z - z.mean(0) / 2

    assert layer_check(Mixed(), F.cross_entropy, *rows(), "fc").identity > 0.01


@pytest.mark.parametrize("case", ["mlp", "cnn"])
def test_every_eigenvalue_lies_in_a_layers_interval(case: str) -> None:
    model, (x, y) = CASES[case][0](), CASES[case][1]()
    result = gershgorin(model, F.cross_entropy, x, y)
    assert result.outside == 0
    assert result.top.holds
    assert max(result.blocks) <= float(result.eigenvalues[-1]) + 1e-12  # interlacing
    assert torch.allclose(result.eigenvalues, torch.linalg.eigvalsh(dense(model, x, y)), atol=1e-10)
    assert all(r > 0 for r in result.radii.values())
    narrow = {
        name: (low + r, high - r)
        for (name, (low, high)), r in zip(result.intervals.items(), result.radii.values(), strict=True)
    }
    assert replace(result, intervals=narrow).outside > 0  # the radii are needed


def test_a_violated_bound_says_so() -> None:
    assert not Bound("x", 2.0, 1.0).holds
    assert Bound("x", 1.0, 1.0).holds


def test_bad_input_is_one_line() -> None:
    with pytest.raises(UserError, match="layer: '1' is no linear or plain conv layer of the model; those are 0, 2, 4"):
        layer_check(mlp(), F.cross_entropy, *rows(), "1")
    for other in ({"groups": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "circular"}):
        with pytest.raises(UserError, match="layer: '0' is no linear or plain conv layer"):
            layer_check(nn.Sequential(nn.Conv2d(2, 2, 3, **other)), F.cross_entropy, *images(), "0")
    twice = nn.Linear(5, 5)
    with pytest.raises(UserError, match="layer: called 2 times in a forward pass"):
        layer_check(nn.Sequential(twice, twice), F.cross_entropy, *rows(), "0")


def test_a_linear_layer_on_sequences_has_positions_as_a_convolution_has() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
    check = layer_check(model, F.cross_entropy, torch.randn(5, 3, 2), torch.tensor([0, 1, 2, 0, 1]), "0")
    assert check.identity < 1e-12
    assert check.approximation > 0.01
    assert all(b.holds for b in check.bounds)
    assert check.bounds[1].right == pytest.approx(check.bounds[2].right)
