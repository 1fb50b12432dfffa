"""ActivationNorm against the direct formula: which activations count."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import grad

from fedman.models import build
from fedman.penalties.man import ActivationNorm
from tests.penalties.man_cases import NAMES, Functional, Mixed, activations, close, direct, expected_gradient


def test_terms_values_and_gradient(case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
    model, man, x = case
    expected = direct(model, x)
    gradient = expected_gradient(model, x, expected)
    out = model(x)
    terms = man.terms()
    assert list(terms) == NAMES
    close(list(terms.values()), expected)
    close(man.values, {name: t.item() for name, t in terms.items()})
    close(list(grad(out.sin().sum() + sum(terms.values()), list(model.parameters()))), gradient)
    out = model(x)
    close(list(grad(out.sin().sum() + man(), list(model.parameters()))), gradient)


@pytest.mark.parametrize("name", ["cifar_cnn", "tiny_cnn", "mlp"])
def test_models_of_the_paper(name: str) -> None:
    """The hidden ReLU outputs before pooling, and the logits; `output=False` leaves these out."""
    side = 64 if name == "tiny_cnn" else 32
    model, x = build(name, (3, side, side), 10), torch.randn(2, 3, side, side)
    a, taps = x.flatten(1) if name == "mlp" else x, []
    for conv, norm in zip(getattr(model, "convs", []), getattr(model, "norms", []), strict=True):
        taps.append(norm(conv(a)).relu())
        a = F.max_pool2d(taps[-1], 2)
    for linear in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        taps.append(linear(a.flatten(1)))
        a = taps[-1].relu()
    taps = [a.relu() for a in taps[:-1]] + taps[-1:]
    man = ActivationNorm(model)
    model(x)
    terms = man.terms()
    assert list(terms) == [f"relus.{i}" for i in range(len(taps) - 1)] + ["output"]
    close(list(terms.values()), [a.square().mean() for a in taps])
    hidden = ActivationNorm(model, output=False)
    model(x)
    close(hidden(), sum(a.square().mean() for a in taps[:-1]))


def test_named_layers_and_measures() -> None:
    model, x = Mixed(), torch.randn(7, 4)
    a = activations(model, x)
    man = ActivationNorm(model, ["second", "tanh"])
    model(x)
    terms = man.terms()
    assert list(terms) == ["second", "tanh", "output"]
    close(list(terms.values()), [model.second(a[0]).square().mean(), *[a[i].square().mean() for i in (3, 6)]])
    man = ActivationNorm(model, {"first": lambda a: a.abs().sum(1)}, output=False)
    model(x)
    close(man(torch.arange(7.0)), (model.first(x).abs().sum(1) * torch.arange(7.0)).sum())
    man = ActivationNorm(model, "third")
    model(x)
    assert list(man.terms()) == ["third"]  # the model's output itself: once


def test_every_activation_module_and_function_counts_once() -> None:
    for module in [
        nn.Threshold(0.1, 0), nn.ReLU(), nn.ReLU(inplace=True), nn.RReLU(), nn.Hardtanh(), nn.ReLU6(), nn.Sigmoid(),
        nn.Hardsigmoid(), nn.Tanh(), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.ELU(), nn.CELU(), nn.SELU(), nn.GLU(),
        nn.GELU(), nn.Hardshrink(), nn.LeakyReLU(), nn.LogSigmoid(), nn.Softplus(), nn.Softshrink(), nn.PReLU(),
        nn.Softsign(), nn.Tanhshrink(),
    ]:  # fmt: skip
        model = nn.Sequential(nn.Linear(4, 6), module, nn.Flatten())
        man = ActivationNorm(model, output=False)
        a = model(torch.randn(5, 4))
        (term,) = man.terms().items()
        assert term[0] == "1"
        close(term[1], a.square().mean())
    for function in [
        F.relu, torch.relu, Tensor.relu, F.relu_, torch.relu_, Tensor.relu_, F.relu6, F.leaky_relu, F.elu, F.elu_,
        F.selu, F.celu, F.gelu, F.silu, F.mish, F.glu, torch.tanh, Tensor.tanh_, F.hardtanh, F.tanhshrink, F.sigmoid,
        torch.sigmoid, F.hardsigmoid, F.logsigmoid, F.hardswish, F.softplus, F.softsign, F.softshrink, F.hardshrink,
        F.rrelu, lambda x: F.prelu(x, torch.ones(1)), lambda x: F.threshold(x, 0, 0), lambda x: F.relu(input=x),
    ]:  # fmt: skip
        model = Functional(function)
        man = ActivationNorm(model, output=False)
        a = model(torch.randn(5, 4))
        (term,) = man.terms().items()
        assert term[0].endswith("#1")
        close(term[1], a.square().mean())


def test_softmax_integers_and_calls_outside_do_not_count() -> None:
    def function(x: Tensor) -> Tensor:
        assert torch.relu(torch.arange(3)).tolist() == [0, 1, 2]
        return x.softmax(-1)

    model = nn.Sequential(Functional(function), nn.Softmax(-1))
    man = ActivationNorm(model)
    out = model(torch.randn(5, 4))
    torch.relu(out)
    nn.ReLU()(out)
    assert list(man.terms()) == ["output"]


def test_a_model_that_ends_in_an_activation_counts_it_once() -> None:
    for model in (nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()), Functional(torch.tanh), nn.ReLU()):
        man = ActivationNorm(model)
        out = model(torch.randn(5, 4))
        close(man(), out.square().mean())


def test_a_module_named_output_is_a_layer_of_its_own() -> None:
    model = nn.Sequential()
    model.add_module("first", nn.Tanh())
    model.add_module("output", nn.ReLU(inplace=True))
    model.add_module("last", nn.Linear(4, 3))
    man = ActivationNorm(model)
    with torch.no_grad():
        out = model(torch.randn(5, 4))
    terms = man.terms()
    assert list(terms) == ["first", "output", "output#2"]
    close(terms["output#2"], out.square().mean())


def test_weight_masks_padding_and_batch_need_not_come_first(case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
    model, man, x = case
    model(torch.cat([x[:3], torch.zeros(4, 4)]))
    masked = man.terms(torch.tensor([1.0] * 3 + [0.0] * 4) / 3)
    model(x[:3])
    close(masked, man.terms())
    attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)  # tokens first
    man = ActivationNorm(attention)
    taps: list[Tensor] = []
    attention.linear2.register_forward_pre_hook(lambda _, args: taps.append(args[0]))
    out = attention(torch.randn(9, 2, 4))
    close(man(), taps[0].square().mean() + out.square().mean())
    transposed = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Flatten(0), nn.Unflatten(0, (3, 5)))
    man = ActivationNorm(transposed)
    out = transposed(torch.randn(5, 4))
    close(man(), 2 * out.square().mean())


def test_only_the_latest_pass_counts(case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
    model, man, x = case
    model(x)
    model(2 * x)
    close(man(), sum(direct(model, 2 * x)))


def test_recursion_is_one_pass() -> None:
    class Tree(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            return torch.tanh(x if depth == 0 else self(x, depth - 1) * 2)

    model, x = Tree(), torch.randn(3, 2)
    man = ActivationNorm(model)
    model(x, 2)
    a = [x.tanh(), (2 * x.tanh()).tanh(), (2 * (2 * x.tanh()).tanh()).tanh()]
    close(list(man.terms().values()), [t.square().mean() for t in a])


@pytest.mark.parametrize("bound", [nn.LSTM(4, 3), nn.GRU(4, 3), nn.MultiheadAttention(4, 2)])
def test_outputs_of_several_tensors(bound: nn.Module) -> None:
    """The first tensor counts and the output's form stays; so for the modules of a model."""
    bound.double()
    args = [torch.randn(6, 2, 4)] * (3 if isinstance(bound, nn.MultiheadAttention) else 1)
    expected = bound(*args)
    man = ActivationNorm(bound)
    out = bound(*args)
    assert type(out) is type(expected)
    close(man(), expected[0].square().mean())

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = bound

        def forward(self, *args: Tensor) -> dict[str, object]:
            out = self.inner(*args)
            return {"loss": out[0].sum(), "count": 3, "logits": out[0] + 1}

    man.remove()
    model = Around()
    man = ActivationNorm(model, ["inner"])
    out = model(*args)
    terms = man.terms()
    close(list(terms.values()), [expected[0].square().mean(), (expected[0] + 1).square().mean()])
    assert list(out) == ["loss", "count", "logits"]
    grad(terms["output"], list(bound.parameters()), allow_unused=True)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.integers(1, 4), st.booleans())
@settings(max_examples=20, deadline=None)
def test_any_small_network(widths: list[int], batch: int, images: bool) -> None:
    kinds = (nn.ReLU(), nn.Tanh(), nn.GELU())
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(a, b, 3, padding=1) if images else nn.Linear(a, b), kinds[i % 3]]
    model = nn.Sequential(*layers, nn.Flatten())
    x = torch.randn(batch, widths[0], *((5, 5) if images else ()))
    a, expected = x, torch.zeros(())
    for layer in layers:
        a = layer(a)
        expected = expected + (0 if isinstance(layer, (nn.Conv2d, nn.Linear)) else a.square().mean())
    expected = expected + (a.square().mean() if images else 0)  # Flatten of rows is the activation itself
    gradient = grad(expected, list(model.parameters()))
    man = ActivationNorm(model)
    model(x)
    close(list(grad(man(), list(model.parameters()))), list(gradient))
