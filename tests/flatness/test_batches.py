"""Data in every form that `Batches` accepts gives the same Hessian."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fedman.flatness import Hessian
from tests.flatness.flat_cases import dense, mlp, rows


def test_however_the_data_comes_the_mean_is_over_samples() -> None:
    model, (x, y) = mlp(), rows()
    expected = dense(model, x, y)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    ragged = [(x[:2], y[:2]), (x[2:9], y[2:9]), (x[9:], y[9:])]
    for data in (loader, ragged, iter(ragged), [(x, y)], [[x, y]]):
        hessian = Hessian(model, F.cross_entropy, data, dtype=torch.float64, batch_size=5, resident=False)
        assert torch.allclose(hessian.dense(), expected, atol=1e-12)
    first = Hessian(model, F.cross_entropy, ragged, dtype=torch.float64, limit=7)
    assert first.samples == 7
    assert torch.allclose(first.dense(), dense(model, x[:7], y[:7]), atol=1e-12)


def test_inputs_may_be_tuples_and_mappings() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.linear(left + right)

    model, (x, y) = Two(), rows()
    x = x.double()  # in float32, 3 * x would round
    expected = dense(model.linear, 3 * x, y)
    for inputs in ((x, 2 * x), {"right": 2 * x, "left": x}):
        hessian = Hessian(model, F.cross_entropy, [(inputs, y)], dtype=torch.float64, batch_size=6)
        assert torch.allclose(hessian.dense(), expected, atol=1e-12)
