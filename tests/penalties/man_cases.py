"""A model with all kinds of activations, and what ActivationNorm should find in it, by the direct formula."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call

from fedman.penalties.man import ActivationNorm


class Mixed(nn.Module):
    """Modules and functional calls, one module used twice, an in-place activation; `part` is run by `runner`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3)
        self.relu, self.tanh = nn.ReLU(), nn.Tanh()
        self.runner: Callable[..., Tensor] = lambda f, x: f(x)
        self.seen: list[weakref.ref[Tensor]] = []

    def part(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        self.seen.append(weakref.ref(x))
        return F.gelu(self.second(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.runner(self.part, self.first(x))
        x = self.relu(self.tanh(torch.tanh(x)))
        self.seen.append(weakref.ref(x))
        return self.third(F.silu(x * 2, inplace=True))


NAMES = ["relu", "gelu#1", "tanh#1", "tanh", "relu#2", "silu#1", "output"]


def activations(model: Mixed, x: Tensor) -> list[Tensor]:
    a = [model.first(x).relu()]
    a += [F.gelu(model.second(a[0]))]
    a += [a[1].tanh(), a[1].tanh().tanh(), a[1].tanh().tanh().relu()]
    a += [F.silu(a[4] * 2)]
    return [*a, model.third(a[5])]


def direct(model: Mixed, x: Tensor) -> list[Tensor]:
    return [a.square().mean() for a in activations(model, x)]


def expected_gradient(model: nn.Module, x: Tensor, terms: list[Tensor]) -> list[Tensor]:
    """Of sin(output) + R, by the direct formula."""
    with_taps = copy.deepcopy(model)
    ActivationNorm(with_taps).remove()
    plain = functional_call(with_taps, dict(model.named_parameters()), (x,))
    return list(grad(plain.sin().sum() + sum(terms), list(model.parameters())))


def close(ours: object, expected: object, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


class Functional(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * 1)
