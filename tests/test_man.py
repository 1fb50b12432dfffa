"""ActivationNorm against the direct formula: which activations count, under every way of running a model."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call, jvp, vmap
from torch.utils.checkpoint import checkpoint

from fedman.errors import UserError
from fedman.man import ActivationNorm
from fedman.models import build


@pytest.fixture(autouse=True)
def _setting() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    assert torch.overrides._get_current_function_mode() is None


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


@pytest.fixture
def case() -> tuple[Mixed, ActivationNorm, Tensor]:
    model = Mixed()
    return model, ActivationNorm(model), torch.randn(7, 4)


# --- what counts ---------------------------------------------------------------------------------------------------


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
    """a_1 ... a_L of protocol section 2: before pooling, logits included; `output=False` leaves them out."""
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


class Functional(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * 1)


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


# --- ways of running a model ----------------------------------------------------------------------------------------


def test_hessian_by_double_backward(case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
    model, man, x = case
    p = list(model.parameters())
    v = [torch.randn_like(q) for q in p]

    def product(objective: Tensor) -> list[Tensor]:
        first = grad(objective, p, create_graph=True)
        return list(grad(sum((g * u).sum() for g, u in zip(first, v, strict=True)), p))

    close(product(model(x).sin().sum() + man()), product(activations(model, x)[-1].sin().sum() + sum(direct(model, x))))


def test_torch_func(case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
    """grad, jvp, vmap of grad, and vmap inside autograd, each model with its own weights and sample weights."""
    model, man, x = case
    p = {name: q.detach() for name, q in model.named_parameters()}

    def objective(p: dict[str, Tensor], x: Tensor, weight: Tensor | None = None) -> Tensor:
        return functional_call(model, p, (x,)).sin().sum() + sum(man.terms(weight).values())

    expected = dict(zip(p, expected_gradient(model, x, direct(model, x)), strict=True))
    close(torch.func.grad(objective)(p, x), expected)
    assert man.values == {}
    v = {name: torch.randn_like(q) for name, q in p.items()}
    close(jvp(lambda p: objective(p, x), (p,), (v,))[1], sum((expected[name] * v[name]).sum() for name in p))

    stacked = {name: torch.stack([q, 2 * q]) for name, q in p.items()}
    weight = torch.rand(2, 7)
    each = [torch.func.grad(objective)({name: q[i] for name, q in stacked.items()}, x, weight[i]) for i in range(2)]
    both = {name: torch.stack([each[0][name], each[1][name]]) for name in p}
    close(vmap(torch.func.grad(objective), (0, None, 0))(stacked, x, weight), both)
    leaves = {name: q.requires_grad_() for name, q in stacked.items()}
    losses = vmap(objective, (0, None, 0))(leaves, x, weight)
    close(dict(zip(p, grad(losses.sum(), list(leaves.values())), strict=True)), both)


def test_autocast() -> None:
    """Half-precision activations, float32 terms, gradients near the exact ones."""
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(16, 300), nn.ReLU(), nn.Linear(300, 4))
    x = torch.randn(8, 16)
    man = ActivationNorm(model)
    results = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = model(x)
            terms = man.terms()
        assert {t.dtype for t in terms.values()} == {torch.float32}
        assert (out.dtype == torch.bfloat16) == enabled
        results.append([*terms.values(), *grad(sum(terms.values()), list(model.parameters()))])
    for half, full in zip(*results, strict=True):
        assert (half - full).norm() < 0.02 * full.norm()


@pytest.mark.parametrize("whole_step", [False, True])
def test_compile(whole_step: bool, case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
    model, man, x = case
    model.seen = type("Ignore", (list,), {"append": lambda *_: None})()  # type: ignore[assignment]
    gradient = expected_gradient(model, x, direct(model, x))
    torch.compiler.reset()
    if whole_step:
        step = torch.compile(lambda x: model(x).sin().sum() + man(), backend="aot_eager", fullgraph=True)
    else:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        step = lambda x: compiled(x).sin().sum() + man()  # noqa: E731
    for _ in range(2):
        close(list(grad(step(x), list(model.parameters()))), gradient)
        close(list(man.values.values()), [t.item() for t in direct(model, x)])
        assert list(man.values) == NAMES


def test_gradient_checkpointing(case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
    """Of a part, of the whole model, of both: no tap counts twice, and modules' activations are not kept."""
    model, man, x = case
    gradient = expected_gradient(model, x, direct(model, x))
    again = lambda f, x: checkpoint(f, x, use_reentrant=False)  # noqa: E731
    for part in (model.runner, again):
        for whole in (model.runner, again):
            if part is whole is not again:
                continue
            model.runner, model.seen = part, []
            out = whole(model, x)
            assert model.seen[0]() is None
            loss = out.sin().sum() + man()
            close(list(grad(loss, list(model.parameters()))), gradient)
            assert list(man.values) == NAMES
            with pytest.raises(UserError, match="no forward pass"):
                man()
    model.runner = lambda f, x: checkpoint(f, x, use_reentrant=True)
    with pytest.raises(UserError, match="'relu' is checkpointed with use_reentrant=True; use False"):
        model(x)
    model.runner = lambda f, x: f(x)
    model(x)
    close(man(), sum(direct(model, x)))


def test_copies_carry_their_own_taps() -> None:
    x = torch.randn(7, 4)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    man = ActivationNorm(model)
    model(x)
    both = copy.deepcopy((model, man))
    alone = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save((model, man), file)
    file.seek(0)
    for net, norm in [both, (alone, ActivationNorm(alone)), torch.load(file, weights_only=False)]:
        net[0].weight.data.mul_(2)
        out = net(x)
        close(norm(), net[1](net[0](x)).square().mean() + out.square().mean())
        assert len(net[1]._forward_hooks) == 1
    with pytest.raises(UserError, match="no forward pass"):
        both[1]()
    close(man(), model[1](model[0](x)).square().mean() + model[2](model[1](model[0](x))).square().mean())


def test_threads_do_not_meet() -> None:
    """Two models in two threads, kept in step so that both are inside their forward pass at once."""
    barrier = threading.Barrier(2, timeout=20)

    def function(x: Tensor) -> Tensor:
        for _ in range(5):
            barrier.wait()
            x = torch.tanh(x)
        return x

    results: dict[int, list[Tensor]] = {}

    def work(i: int) -> None:
        model, x = Functional(function), torch.full((2, 3), float(i + 1))
        man = ActivationNorm(model)
        for _ in range(3):
            model(x)
            results[i] = list(man.terms().values())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        a, expected = torch.full((2, 3), float(i + 1)), []
        for _ in range(5):
            a = a.tanh()
            expected.append(a.square().mean())
        close(results[i], expected)


# --- nothing is left behind -----------------------------------------------------------------------------------------


def test_activations_are_freed(case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
    model, man, x = case
    gc.disable()
    try:
        (model(x).sum() + man()).backward()
        assert [ref() for ref in model.seen] == [None, None]  # after a step
        out = model(x)
        del out
        model(2 * x)
        assert [ref() for ref in model.seen[2:4]] == [None, None]  # after a pass that nobody measured
        model.seen.clear()
        with torch.no_grad():
            model.seen.append(weakref.ref(model(x)))
        assert [ref() for ref in model.seen] == [None, None, None]  # at once without gradients
        close(man(), sum(direct(model, x)))
        net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        ActivationNorm(net)
        gone = weakref.ref(net[0].weight)
        del net
        assert gone() is None  # the hooks make no cycle of the model
    finally:
        gc.enable()


def test_remove_leaves_the_model_as_it_was() -> None:
    model, x = Mixed(), torch.randn(7, 4)
    with ActivationNorm(model) as man:
        model(x)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert set(vars(model)) == set(vars(Mixed()))
    nodes = [model(x).grad_fn]
    while nodes:
        node = nodes.pop()
        assert "ActivationTap" not in node.name()
        nodes += [n for n, _ in node.next_functions if n is not None]
    with pytest.raises(UserError, match="no forward pass"):
        man()


def test_a_new_one_takes_the_place_of_the_old(case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
    model, old, x = case
    man = ActivationNorm(model)
    model(x)
    close(man(), sum(direct(model, x)))
    assert len(model.relu._forward_hooks) == 1
    with pytest.raises(UserError, match="no forward pass"):
        old()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_a_failure_in_the_forward_pass(error: type[BaseException]) -> None:
    model, x = Mixed(), torch.randn(7, 4)
    man = ActivationNorm(model)
    run = model.runner

    def fail(f: object, x: Tensor) -> Tensor:
        torch.tanh(x)
        raise error

    model(x)
    model.runner = fail
    for _ in range(2):
        with pytest.raises(error):
            model(x)
        with pytest.raises(UserError, match="no forward pass"):
            man()
    model.runner = run
    model(x)
    assert torch.overrides._get_current_function_mode() is None
    close(man(), sum(direct(model, x)))


def test_an_interrupted_pass_under_another_mode() -> None:
    """The mode that an interrupted pass left on counts nothing, even where it cannot be taken off."""
    calls = 0

    def function(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        return torch.tanh(x) + 1

    model, x = Functional(function), torch.randn(3, 2)
    man = ActivationNorm(model)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    with torch.device("cpu"):
        model(x)
    torch.overrides._pop_mode()
    assert list(man.terms()) == ["tanh#1", "output"]


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_man_without_a_forward_pass(case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
    model, man, x = case
    with pytest.raises(UserError, match=r"^ActivationNorm: no forward pass to measure; call the model before each man"):
        man()
    model(x)
    man.terms()
    with pytest.raises(UserError, match="no forward pass"):
        man()
    model.relu(x)  # a part of the model is not the model
    with pytest.raises(UserError, match="no forward pass"):
        man()


def test_nothing_to_measure() -> None:
    for model, layers in [(nn.Linear(4, 3), None), (Mixed(), [])]:
        man = ActivationNorm(model, layers, output=False)
        model(torch.randn(2, 4))
        with pytest.raises(UserError, match="no activation to measure; use output=True or layers"):
            man()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["relu", "secnd"], "layers: the model has no module 'secnd'; it has 'second'$"),
        (["zzz"], "layers: the model has no module 'zzz'; it has 'first', 'second', 'third', 'relu', 'tanh'$"),
        ([""], "layers: the model has no module ''"),
        ([3], "layers: the model has no module 3"),
        ({"relu": 2}, "layers: the measure of 'relu' is 2, not a function"),
        ({"relu": lambda a: a.sum()}, r"the measure of 'relu' maps an activation \(7, 5\) to \(\), not to \(7,\)"),
        ({"relu": lambda a: a}, r"the measure of 'relu' maps an activation \(7, 5\) to \(7, 5\), not to \(7,\)"),
    ],
)
def test_wrong_layers(layers: object, message: str) -> None:
    model = Mixed()

    def measure() -> None:
        ActivationNorm(model, layers)  # type: ignore[arg-type]
        model(torch.randn(7, 4))

    with pytest.raises(UserError, match=message):
        measure()


def test_a_list_of_modules_is_never_called() -> None:
    with pytest.raises(UserError, match="'relus' is a list of modules and never called itself"):
        ActivationNorm(build("mlp", (4,), 2), ["relus"])


def test_wrong_weight(case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
    model, man, x = case
    for weight in (torch.ones(6), torch.ones(7, 1), torch.ones(())):
        model(x)
        with pytest.raises(UserError, match=r"^weight: shape \(.*\) does not fit layer 'relu' with 7 samples$"):
            man(weight)


@pytest.mark.parametrize("out", [torch.arange(3), {"loss": torch.zeros(()), "n": 3}, "text", ()])
def test_an_output_that_cannot_be_measured(out: object) -> None:
    model = Functional(lambda x: out)  # type: ignore[arg-type, return-value]
    ActivationNorm(model)
    with pytest.raises(UserError, match=r"the model's output has no floating-point tensor of samples .*output=False$"):
        model(torch.randn(3, 2))
    ActivationNorm(model, output=False)
    assert model(torch.randn(3, 2)) is out


def test_replicas_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    ActivationNorm(model)
    for part in (model, model[1]):
        with pytest.raises(UserError, match=r"nn\.DataParallel hides its replicas' activations"):
            part._replicate_for_data_parallel()(torch.randn(2, 4))
