"""ActivationNorm under autograd of any order, torch.func, autocast, torch.compile, checkpointing, copies, threads."""

from __future__ import annotations

import copy
import io
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call, jvp, vmap
from torch.utils.checkpoint import checkpoint

from fedman.errors import UserError
from fedman.penalties.man import ActivationNorm
from tests.penalties.man_cases import NAMES, Functional, Mixed, activations, close, direct, expected_gradient


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


class OfModules(nn.Module):
    """Activation modules only; `part` is run by `runner`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.relu, self.tanh = nn.ReLU(), nn.Tanh()
        self.runner: Callable[..., Tensor] = run_once
        self.seen: list[weakref.ref[Tensor]] = []

    def part(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        self.seen.append(weakref.ref(x))
        return self.tanh(self.second(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.runner(self.part, self.first(x))) * 2


def run_once(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return f(x)


def run_again(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(f, x, use_reentrant=False)


def test_gradient_checkpointing() -> None:
    """Of a part, of the whole model, of both: no tap counts twice, and activations are not kept."""
    model, x = OfModules(), torch.randn(7, 4)
    a = [model.first(x).relu()]
    a += [model.second(a[0]).tanh()]
    a += [a[1].relu(), a[1].relu() * 2]
    gradient = grad(a[-1].sin().sum() + sum(t.square().mean() for t in a), list(model.parameters()))
    man = ActivationNorm(model)
    for part, whole in [(run_again, run_once), (run_once, run_again), (run_again, run_again)]:
        model.runner, model.seen = part, []
        out = whole(model, x)
        assert model.seen[0]() is None
        loss = out.sin().sum() + man()
        close(grad(loss, list(model.parameters())), gradient)
        assert list(man.values) == ["relu", "tanh", "relu#2", "output"]
        with pytest.raises(UserError, match="no forward pass"):
            man()


def test_checkpointing_that_cannot_be_measured(case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
    model, man, x = case
    run = model.runner
    model.runner = run_again
    with pytest.raises(UserError, match="gelu is called as a function in a checkpointed part"):
        model(x)
    with torch.no_grad():
        model(x)
    close(man(), sum(direct(model, x)))
    model.runner = lambda f, x: checkpoint(f, x, use_reentrant=True)
    with pytest.raises(UserError, match="'relu' is checkpointed with use_reentrant=True; use False"):
        model(x)
    model.runner = run
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


def test_models_in_two_threads_do_not_interfere() -> None:
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
