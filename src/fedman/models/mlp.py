"""A multilayer perceptron, for samples of any shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Flatten, linear layers with ReLU, logits."""

    def __init__(self, shape: Sequence[int], classes: int, hidden: Sequence[int] = (64, 32)) -> None:
        super().__init__()
        widths = [math.prod(shape), *hidden]
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.relus = nn.ModuleList(nn.ReLU() for _ in hidden)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for linear, relu in zip(self.linears, self.relus, strict=True):
            x = relu(linear(x))
        return self.head(x)
