"""Second derivatives of convolutions of every form against dense Hessians."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedman.flatness import Hessian
from tests.flatness.flat_cases import dense


class Convolutional(nn.Module):
    """Convolutions of every form: one to three axes, strides, padding, dilation, groups, no bias, padding by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.line = nn.Conv1d(2, 4, 3, stride=2, padding=1, groups=2)
        self.plane = nn.Conv2d(1, 2, (2, 3), stride=(1, 2), padding=(1, 0), dilation=(2, 1), bias=False)
        self.solid = nn.Conv3d(1, 2, 2)
        self.named = nn.Conv2d(2, 2, 3, padding="same")
        self.shared = nn.Parameter(torch.randn(2, 2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.line(x.flatten(2)))  # [n, 4, 18]
        b = torch.tanh(self.plane(a.reshape(-1, 1, 6, 12)))  # [n, 2, 6, 5]
        c = torch.tanh(self.named(b) + F.conv2d(b, weight=self.shared))
        c = torch.stack([torch.conv2d(one, self.shared) for one in c])  # no batch axis
        return torch.tanh(self.solid(c.reshape(len(x), 1, 2, 6, 5))).sum((2, 3, 4)) @ torch.eye(2, 3, dtype=x.dtype)


def test_convolutions_of_every_form() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 2, 6, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)
    expected = dense(Convolutional(), x, y)
    matrix = Hessian(Convolutional(), F.cross_entropy, (x, y), dtype=torch.float64).dense()
    assert (matrix - expected).norm() < 1e-12 * expected.norm()
