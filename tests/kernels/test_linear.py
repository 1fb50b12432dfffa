"""Stacked linear layers and the cross-entropy head against the reference."""

from __future__ import annotations

import pytest
import torch

from fedman.kernels import head, linear
from fedman.kernels.stage import STORAGE
from tests.kernels import kernel_reference as reference
from tests.kernels.kernel_checks import PRECISIONS, TOLERANCE, relative, shares


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("clients", "batch", "i", "n"), [(1, 1, 20, 7), (3, 7, 33, 40), (2, 50, 130, 65), (1, 70, 16, 16)]
)
def test_layer(clients: int, batch: int, i: int, n: int, precision: str, device: torch.device) -> None:
    """Forward, both gradients and MAN, the input being a hidden ReLU output with a MAN term of its own."""
    x = torch.randn(clients, batch, i, device=device).relu().to(STORAGE[precision])
    flat = 0.2 * torch.randn(clients, 5 + n * i + n + 2, device=device)  # the layer lies inside longer rows
    rows = flat[:, 5:]
    dz = torch.randn(clients, batch, n, device=device).to(x.dtype)
    share, zeta = shares(clients, batch, device), torch.rand(clients, device=device)

    x64, rows64 = x.double().requires_grad_(), rows.double().requires_grad_()
    w64, bias64 = rows64[:, : n * i].view(clients, n, i), rows64[:, n * i : n * i + n]
    tolerance = TOLERANCE[precision]
    for hidden in (True, False):
        out64, man64 = reference.linear(x64, w64, bias64, hidden, share.double())
        man = torch.full((clients, 64), torch.nan, device=device)
        out = linear.forward(x, rows, n, hidden, share, man, precision)
        assert out.dtype == (x.dtype if hidden else torch.float32)
        assert relative(out, out64) < tolerance
        assert relative(man[:, : linear.blocks(batch, n)].sum(1), man64) < 2 * tolerance

    (dx64, drows64) = torch.autograd.grad(out64, (x64, rows64), dz.double())
    assert relative(linear.input_gradient(dz, rows, x, None, share, precision), dx64) < tolerance
    before64 = dx64 * (x64 > 0) + 2 * zeta[:, None, None] * share[..., None] / i * x64
    assert relative(linear.input_gradient(dz, rows, x, zeta, share, precision), before64) < tolerance

    grad = torch.full_like(flat, torch.nan)
    linear.weight_gradient(dz, x, grad[:, 5:], precision)
    assert relative(grad[:, 5 : 5 + n * i + n], drows64[:, : n * i + n]) < tolerance
    assert grad[:, :5].isnan().all()
    assert grad[:, 5 + n * i + n :].isnan().all()


@pytest.mark.parametrize(("clients", "batch", "classes"), [(1, 1, 2), (3, 7, 10), (2, 70, 100)])
def test_head(clients: int, batch: int, classes: int, device: torch.device) -> None:
    logits = 30 * torch.randn(clients, batch, classes, device=device)  # large enough to overflow a plain exp
    y = torch.randint(classes, (clients, batch), device=device)
    share = shares(clients, batch, device)
    dce, dman = torch.rand(clients, device=device), torch.rand(clients, 3, device=device)
    partial = torch.full((clients, 3, 5), torch.nan, device=device)
    parts = (5, 1, 2)
    for layer, count in enumerate(parts):
        partial[:, layer, :count] = torch.rand(clients, count, device=device)

    ce, man = head.forward(logits, y, share, partial, parts)
    z64 = logits.double().requires_grad_()
    ce64 = reference.cross_entropy(z64, y, share.double())
    assert relative(ce, ce64) < 1e-6
    assert relative(man, partial.nan_to_num().sum(2)) < 1e-6

    objective = (dce * ce64).sum() + (dman[:, 2] * reference.mean_squares(z64, share.double())).sum()
    (d64,) = torch.autograd.grad(objective, z64)
    assert relative(head.backward(logits, y, share, dce, dman[:, 2], torch.float32), d64) < 1e-6
