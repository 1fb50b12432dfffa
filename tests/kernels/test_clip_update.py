"""The fused clip, decay and update against its formula."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedman.algorithms import Local
from fedman.algorithms.steps import climb
from fedman.kernels import update
from fedman.kernels.update import clip_update
from tests.kernels import kernel_reference as reference
from tests.kernels.kernel_checks import relative


@pytest.mark.parametrize(("clients", "size"), [(1, 5), (3, 8192), (2, 20_001)])
@pytest.mark.parametrize("clip", [10.0, math.inf, 1e-3])
def test_equals_formula(clients: int, size: int, clip: float, device: torch.device) -> None:
    w = torch.randn(clients, size, device=device)
    g = torch.randn(clients, size, device=device) * torch.tensor([0.001, 1.0, 50.0], device=device)[:clients, None]
    lr = torch.rand(clients, device=device)
    expected = reference.clip_update(w.double(), g.double(), lr.double(), clip, 0.01)
    assert relative(clip_update(w, g, lr, clip, 0.01, 0.0), expected) < 1e-6
    out = clip_update(w, g, lr[0], clip, 0.01, 0.0)
    assert relative(out[0], expected[0]) < 1e-6
    extra = torch.rand(clients, 1, device=device)
    more = expected - lr.double()[:, None] * extra * w
    assert relative(clip_update(w, g, lr, clip, 0.01, extra), more) < 1e-6
    assert relative(clip_update(w, g, lr, clip, 0.004, 0.006), expected) < 1e-6


def test_rows_are_apart_and_zero_rate_keeps(device: torch.device) -> None:
    """A row's result depends on that row alone, not on a huge or broken neighbour; η = 0 keeps the row's bits."""
    w, g = torch.randn(3, 9000, device=device), torch.randn(3, 9000, device=device)
    lr = torch.tensor([0.1, 0.1, 0.0], device=device)
    alone = clip_update(w[:1], g[:1], lr[:1], 1.0, 1e-3, 0.0)
    g[1] = math.nan
    out = clip_update(w, g, lr, 1.0, 1e-3, 0.0)
    assert torch.equal(out[:1], alone)
    assert out[1].isnan().all()
    assert torch.equal(out[2], w[2])


@pytest.mark.parametrize(("clients", "size"), [(1, 5), (3, 8192), (2, 20_001)])
@pytest.mark.parametrize("eta", [None, 0.2])
def test_climb_equals_formula(clients: int, size: int, eta: float | None, device: torch.device) -> None:
    w, s = torch.randn(2, clients, size, device=device)
    s[0] *= 1e-3
    is_weight = torch.rand(size, device=device) < 0.7
    one = torch.ones((), device=device)
    hp = Local(one, 0.1, 0.0, 10.0, one, one, is_weight)
    expected = climb(w.double(), s.double(), 0.5, hp, 1e-7, eta)
    assert relative(update.climb(w, s, 0.5, 1e-7, eta, is_weight) - w, expected - w) < 1e-5
    assert relative(climb(w, s, 0.5, replace(hp, fused=update), 1e-7, eta) - w, expected - w) < 1e-5
    rows = torch.linspace(0.1, 0.9, clients, device=device)[:, None]
    etas = None if eta is None else eta * rows
    expected = climb(w.double(), s.double(), rows, hp, 1e-7, etas)
    assert relative(climb(w, s, rows, replace(hp, fused=update), 1e-7, etas) - w, expected - w) < 1e-5
