"""MAN on recurrent layers and transformers, against the mean of squares of what the plain modules return."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from fedman.errors import UserError
from fedman.models import build
from fedman.penalties import ActivationL1, attach
from fedman.penalties.man import ActivationNorm
from fedman.penalties.measures import mean_square_and_variance
from tests.penalties.man_cases import close


class Around(nn.Module):
    """A recurrent layer, and a linear layer on what it returns."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Any) -> Tensor:
        out, _ = self.layer(x)
        return self.head(pad_packed_sequence(out, batch_first=True)[0] if isinstance(out, PackedSequence) else out)


def shares(samples: list[Tensor], weight: Tensor | None) -> float:
    """Σ_b weight_b·(mean square of sample b's entries), in numpy."""
    given = np.full(len(samples), 1 / len(samples)) if weight is None else weight.numpy()
    return float(sum(w * np.mean(a.detach().numpy() ** 2) for w, a in zip(given, samples, strict=True)))


LAYERS = {
    "LSTM": lambda: nn.LSTM(4, 5, batch_first=True),
    "LSTM time first": lambda: nn.LSTM(4, 5),
    "LSTM of two layers": lambda: nn.LSTM(4, 5, 2),
    "LSTM projected": lambda: nn.LSTM(4, 5, proj_size=2),
    "LSTM in both directions": lambda: nn.LSTM(4, 5, bidirectional=True),
    "GRU": lambda: nn.GRU(4, 5, batch_first=True),
    "GRU time first": lambda: nn.GRU(4, 5, bidirectional=True),
    "RNN": lambda: nn.RNN(4, 5),
    "RNN of ReLUs": lambda: nn.RNN(4, 5, nonlinearity="relu", batch_first=True),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_the_output_sequence_counts(name: str, weighted: bool) -> None:
    model = Around(LAYERS[name]())
    axis = 0 if model.layer.batch_first else 1
    x = torch.randn(6, 6, 4).narrow(1 - axis, 0, 4)  # 6 samples, 4 steps
    weight = torch.rand(6).softmax(0) if weighted else None
    hidden, _ = copy.deepcopy(model.layer)(x)
    man = ActivationNorm(model, output=False)
    out = model(x)
    terms = man.terms(weight)
    assert list(terms) == ["layer"]
    assert terms["layer"].item() == pytest.approx(shares(list(hidden.unbind(axis)), weight), rel=1e-10)
    hidden, _ = plain = model.layer(x)
    term = (hidden.square().movedim(axis, 0).flatten(1).mean(1) * (1 / 6 if weight is None else weight)).sum()
    parameters = list(model.parameters())
    ours = grad(out.sin().sum() + terms["layer"], parameters)
    close(ours, grad(model.head(plain[0]).sin().sum() + term, parameters))


def test_a_recurrent_layer_inside_a_model_is_counted_beside_its_output() -> None:
    model = Around(nn.LSTM(4, 5))
    man = ActivationNorm(model)
    weight = torch.rand(3).softmax(0)
    model(torch.randn(7, 3, 4))
    with pytest.raises(Exception, match="does not fit layer 'output' with 7 samples"):
        man(weight)  # the model's own output has time first, which only it knows
    model(torch.randn(7, 3, 4))
    assert list(man.terms()) == ["layer", "output"]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_packed_sequences_count_the_steps_that_exist(ordered: bool, both: bool, weighted: bool) -> None:
    texts = [torch.randn(n, 4) for n in ([5, 3, 1] if ordered else [3, 1, 5])]
    packed = pack_sequence(texts, enforce_sorted=ordered)
    weight = torch.tensor([0.2, 0.5, 0.3]) if weighted else None
    model = Around(nn.GRU(4, 5, bidirectional=both))
    each = [copy.deepcopy(model.layer)(text)[0] for text in texts]
    expected = sum(
        (1 / 3 if weight is None else weight[i]) * copy.deepcopy(model.layer)(text)[0].square().mean()
        for i, text in enumerate(texts)
    )
    man = ActivationNorm(model)
    out = model(packed)
    terms = man.terms(weight)
    assert terms["layer"].item() == pytest.approx(shares(each, weight), rel=1e-10)
    close(terms["layer"], expected)
    assert out.shape == (3, 5, 3)
    unweighted = sum(model.layer(text)[0].square().mean() for text in texts) / 3
    model(packed)
    parameters = list(model.layer.parameters())
    close(grad(man.terms()["layer"], parameters), grad(unweighted, parameters))


def test_a_packed_output_of_the_model_itself() -> None:
    texts = [torch.randn(n, 4) for n in (2, 5)]
    model = nn.LSTM(4, 5)
    each = [model(text)[0] for text in texts]
    man = ActivationNorm(model)
    out, _ = model(pack_sequence(texts, enforce_sorted=False))
    assert isinstance(out, PackedSequence)
    assert man.terms()["output"].item() == pytest.approx(shares(each, None), rel=1e-10)


def test_the_model_can_be_a_recurrent_layer_itself() -> None:
    """Its samples are on the second axis, and nothing is missing that a warning could be about."""
    model, x, weight = nn.LSTM(4, 5), torch.randn(7, 3, 4), torch.tensor([0.5, 0.5, 0.0])
    expected = model(x)[0][:, :2].square().mean()
    man = ActivationNorm(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    close(man.terms(weight), {"output": expected})


class Unrolled(nn.Module):
    """A cell over the steps of [B, T, 4]."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, states = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(states, 1))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_the_steps_of_a_cell_are_one_layer(kind: str, weighted: bool) -> None:
    """The same term and gradient as of the layer with the same weights."""
    whole = Around(getattr(nn, kind)(4, 5, batch_first=True))
    steps = Unrolled(getattr(nn, kind + "Cell")(4, 5))
    steps.head = whole.head
    for name, p in steps.cell.named_parameters():
        p.data.copy_(getattr(whole.layer, name + "_l0"))
    x, weight = torch.randn(6, 4, 4), torch.rand(6).softmax(0) if weighted else None
    results = []
    for model in (whole, steps):
        man = ActivationNorm(model)
        out = model(x)
        terms = man.terms(weight)
        inner = model.layer if isinstance(model, Around) else model.cell
        results.append(
            (list(terms.values()), grad(out.sin().sum() + terms[next(iter(terms))], list(inner.parameters())))
        )
        assert list(terms) == ["layer" if model is whole else "cell", "output"]
    close(results[1], results[0])


def test_a_cell_whose_batch_shrinks() -> None:
    class Shrinking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.cell(x)
            return self.cell(x[:2], h[:2]) * 2

    model, x = Shrinking(), torch.randn(3, 4)
    first = model.cell(x)
    second = model.cell(x[:2], first[:2])
    man = ActivationNorm(model, output=False)
    model(x)
    close(man.terms(), {"cell": (first.square().mean() + second.square().mean()) / 2})


def test_the_lstm_of_the_text_task() -> None:
    """Each LSTM layer and the output; also with given weights, which is how a client is trained."""
    model = build("lstm", (6,), 9)
    ids = torch.randint(9, (4, 6))
    first, _ = model.lstms[0](model.embedding(ids))
    second, _ = model.lstms[1](first)
    expected = {"lstms.0": first, "lstms.1": second, "output": model.head(second)}
    man = ActivationNorm(model)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    out = functional_call(model.requires_grad_(False), weights, (ids,))
    terms = man.terms()
    close(terms, {name: a.detach().square().mean() for name, a in expected.items()})
    assert all(g.abs().sum() > 0 for g in grad(out.sin().sum() + sum(terms.values()), list(weights.values())))
    l1 = attach(ActivationL1(), model)
    model(ids)
    close(dict(l1.terms()), {name: a.detach().abs().mean() for name, a in expected.items()})


def test_a_cell_under_vmap() -> None:
    model, x = Unrolled(nn.GRUCell(4, 5)), torch.randn(2, 3, 4, 4)
    weights = {name: torch.stack([p, 2 * p]).detach() for name, p in model.named_parameters()}
    man = ActivationNorm(model)

    def term(w: dict[str, Tensor], x: Tensor) -> Tensor:
        functional_call(model, w, (x,))
        return man.terms()["cell"]

    each = [term({name: p[i] for name, p in weights.items()}, x[i]) for i in range(2)]
    close(vmap(term)(weights, x), torch.stack(each))


@pytest.mark.parametrize(
    "activation", [F.relu, F.gelu, "gelu", nn.GELU(), nn.Tanh()], ids=["relu", "gelu", "word", "GELU", "Tanh"]
)
@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_counts_its_feed_forward_activations(activation: Any, training: bool) -> None:
    """One term a layer and the output, in training and in evaluation, where PyTorch has a fused fast path."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).train(training)
    man, taps = ActivationNorm(model), []
    plain = copy.deepcopy(model)
    ActivationNorm(plain).remove()
    for each in plain.layers:
        each.linear2.register_forward_pre_hook(lambda _, args: taps.append(args[0]))
    x = torch.randn(4, 5, 8)
    with torch.set_grad_enabled(training):
        out = model(x)
        terms = man.terms(torch.full((4,), 0.25))
    taps.append(plain(x))
    close(out, taps[-1])
    if isinstance(activation, nn.Module):
        names = [f"layers.{i}.activation" for i in range(3)]
    else:
        names = [f"{activation if isinstance(activation, str) else activation.__name__}#{i + 1}" for i in range(3)]
    assert list(terms) == [*names, "output"]
    close(list(terms.values()), [a.square().mean() for a in taps])


def test_the_transformer_of_the_text_task() -> None:
    model = build("transformer", (6,), 9)
    man = ActivationNorm(model)
    model(torch.randint(9, (4, 6)))
    assert list(man.terms()) == [*(f"layers.{i}.activation" for i in range(4)), "output"]


def test_a_warning_where_nothing_but_the_output_is_measured() -> None:
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) * self.right(x)

    model, x = Bilinear(), torch.randn(2, 4)
    man = ActivationNorm(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x)
    assert [str(w.message) for w in seen] == [
        "MAN: found no activation in Bilinear, only its output counts; "
        "name layers with ActivationNorm(model, [...]), out of 'left', 'right'"
    ]
    assert list(man.terms()) == ["output"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        ActivationNorm(model)
        with torch.no_grad():
            model(x)  # a report, not training
        for layers, output in ((["left"], True), ([], True), (None, False)):
            ActivationNorm(model, layers, output=output)
            model(x)


@pytest.mark.parametrize("name", ["LSTM", "LSTM time first"])
def test_a_measure_of_the_whole_batch(name: str) -> None:
    """Of a layer's sequences, without those that are padding; a packed sequence is refused, and a cell."""
    model = Around(LAYERS[name]())
    man = ActivationNorm(model, {"layer": mean_square_and_variance}, output=False)
    x, real = torch.randn(5, 3, 4), torch.tensor([0.5, 0.5, 0.0])  # time first
    x = x.transpose(0, 1) if model.layer.batch_first else x
    model(x)
    found = man(real)
    model(x[:2] if model.layer.batch_first else x[:, :2])
    torch.testing.assert_close(found, man())
    with pytest.raises(UserError, match="layers: the measure of 'layer' needs a whole batch"):
        model(pack_sequence([torch.randn(4, 4), torch.randn(2, 4)]))
    cell = nn.Sequential(nn.GRUCell(4, 5))
    ActivationNorm(cell, {"0": mean_square_and_variance})
    with pytest.raises(UserError, match="layers: the measure of '0' needs a whole batch"):
        cell(torch.randn(3, 4))
