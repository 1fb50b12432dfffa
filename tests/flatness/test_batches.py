"""Data in every form that `Batches` accepts gives the same Hessian."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedman.errors import UserError
from fedman.flatness import GaussNewton, Hessian, LossAt
from fedman.tasks import LanguageModel
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


WEIGHTED = partial(F.cross_entropy, weight=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
NO_MEANS = {
    "a sum": partial(F.cross_entropy, reduction="sum"),
    "class weights": WEIGHTED,
    "ignored targets": partial(F.cross_entropy, ignore_index=1),
}


@pytest.mark.parametrize("measure", [Hessian, GaussNewton, LossAt])
@pytest.mark.parametrize("case", NO_MEANS)
def test_a_loss_that_depends_on_the_batches_is_refused(measure, case: str) -> None:
    """Of one batch it is what it is, whatever it is divided by."""
    arguments = mlp(), NO_MEANS[case], rows(80)
    measure(*arguments, dtype=torch.float64)
    with pytest.raises(UserError, match=r"loss: of 26 samples .* mean over samples is needed: no sum, no class"):
        measure(*arguments, dtype=torch.float64, batch_size=26)


def test_means_over_samples_are_not_refused() -> None:
    """Class weights divided by a constant; a language model whose samples have unequal numbers of positions; a loss
    of rounding alone; batches too small to compare."""
    model, (x, y) = mlp(), rows(80)
    weight = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    scale = weight[y].mean()
    fixed = Hessian(
        *(model, lambda z, t: (weight[t] * F.cross_entropy(z, t, reduction="none")).mean() / scale, (x, y)),
        dtype=torch.float64,
        batch_size=7,
    )
    expected = Hessian(model, WEIGHTED, (x, y), dtype=torch.float64)
    assert torch.allclose(fixed.dense(), expected.dense(), atol=1e-12)

    text, ids = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), torch.randint(0, 9, (40, 6))
    targets = ids.where(torch.arange(6) < torch.arange(40)[:, None] % 7, -1)
    LossAt(text, LanguageModel().mean_loss, (ids, targets), batch_size=8)
    with torch.no_grad():
        model[-1].bias[0] += 25
    LossAt(model, F.cross_entropy, (x, torch.zeros_like(y)), batch_size=40)
    Hessian(model, WEIGHTED, (x.double(), y), dtype=torch.float64, batch_size=3)
