"""Recurrent layers written out equal PyTorch's own, and can be stacked over models."""

import copy
import itertools

import pytest
import torch
from torch import nn

from fedman.execution.base import Batch
from fedman.execution.choice import choose
from fedman.execution.one_by_one import OneByOne
from fedman.execution.recurrent import unroll
from fedman.execution.vmapped import Vmapped
from fedman.models import build
from fedman.models.parameters import flatten
from fedman.penalties import MAN
from fedman.tasks import LanguageModel

CLOSE = {"rtol": 1e-11, "atol": 1e-12}
LAYERS = [
    (kind, {"num_layers": depth, "bidirectional": both, "batch_first": first, "bias": bias})
    for kind in (nn.LSTM, nn.GRU, nn.RNN)
    for depth, both, first, bias in itertools.product((1, 2), (False, True), (False, True), (True, False))
] + [(nn.LSTM, {"num_layers": 2, "proj_size": 2, "bidirectional": True}), (nn.RNN, {"nonlinearity": "relu"})]


@pytest.mark.parametrize(("kind", "options"), LAYERS, ids=str)
def test_written_out_layers_are_pytorchs(kind, options):
    torch.manual_seed(0)
    layer = kind(3, 4, **options).double()
    written = unroll(copy.deepcopy(layer))
    for x in (torch.randn(5, 6, 3).double(), torch.randn(5, 3).double()):
        out, last = layer(x)
        found, end = written(x)
        torch.testing.assert_close(found, out, **CLOSE)
        torch.testing.assert_close(end, last, **CLOSE)
        again = layer(x, last)[0]
        torch.testing.assert_close(written(x, last)[0], again, **CLOSE)


@pytest.mark.parametrize("name", ["lstm", "transformer"])
@pytest.mark.parametrize("zeta", [0.0, 0.3])
def test_text_models_stacked_are_those_one_by_one(name, zeta):

    torch.manual_seed(0)
    model = build(name, (7,), 5).double()
    W = flatten(model) + 0.05 * torch.randn(3, len(flatten(model))).double()
    x, y = torch.randint(0, 5, (2, 3, 4, 7))
    y[1, 2, 3:] = -1
    weight = torch.tensor([[0.25] * 4, [0.5, 0.5, 0, 0], [0.1, 0.2, 0.3, 0.4]]).double()
    for shares in (None, weight):
        parts = model, LanguageModel(), MAN(), "fp64"
        plain, stacked = (kind(*parts).gradient(W, Batch(x, y, shares), zeta) for kind in (OneByOne, Vmapped))
        for a, b in zip(stacked, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_on_a_cpu_clients_with_recurrent_layers_take_turns():
    ids = torch.zeros(2, 7, dtype=torch.int64)
    for name, kind in (("lstm", OneByOne), ("transformer", Vmapped)):
        parts = build(name, (7,), 5), LanguageModel(), MAN(), "fp32"
        assert type(choose(*parts, torch.device("cpu"), 8, (ids, ids), ())) is kind


def test_what_cannot_be_stacked_says_so():
    packed = nn.utils.rnn.pack_sequence([torch.zeros(2, 3), torch.zeros(1, 3)])
    with pytest.raises(NotImplementedError, match="packed sequences"):
        unroll(nn.GRU(3, 4))(packed)
