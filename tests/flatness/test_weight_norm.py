"""Second derivatives of weights that are normed against dense Hessians of the plain formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import weight_norm as former_weight_norm
from torch.nn.utils.parametrizations import weight_norm

from fedman.flatness import Hessian


class Plain(nn.Module):
    """A layer v·g/‖v‖, with g before v."""

    def __init__(self, layer: nn.Module, dim: int | None) -> None:
        super().__init__()
        self.bias = nn.Parameter(layer.bias.detach().clone())
        v = layer.weight.detach().clone()
        self.over = [i for i in range(v.ndim) if i != dim]
        self.g = nn.Parameter(v.square().sum(self.over, keepdim=dim is not None).sqrt())
        self.v = nn.Parameter(v)

    def forward(self, x: Tensor) -> Tensor:
        w = self.v * self.g / self.v.square().sum(self.over, keepdim=True).sqrt()
        return F.linear(x, w, self.bias) if w.ndim == 2 else F.conv1d(x, w, self.bias)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("make", [weight_norm, former_weight_norm])
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_second_derivatives_of_normed_weights(kind, dim, make):
    torch.manual_seed(0)
    layer, wide = (nn.Linear(5, 4), 4) if kind == "linear" else (nn.Conv1d(2, 3, 2), 12)
    layer, head = layer.double(), nn.Linear(wide, 3).double()
    x, y = torch.randn(6, 5) if kind == "linear" else torch.randn(6, 2, 5), torch.arange(6) % 3
    plain = nn.Sequential(Plain(layer, dim), nn.Tanh(), nn.Flatten(), head)
    normed = nn.Sequential(make(layer, dim=dim), nn.Tanh(), nn.Flatten(), head)
    wanted, found = (Hessian(model, F.cross_entropy, (x, y), dtype=torch.float64).dense() for model in (plain, normed))
    assert (found - wanted).norm() < 1e-12 * wanted.norm()
