"""ActivationNorm frees activations, removes its hooks, and refuses what it cannot measure."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.models import build
from fedman.penalties.man import ActivationNorm
from tests.penalties.man_cases import Functional, Mixed, close, direct


def test_activations_are_freed(case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
    model, man, x = case
    gc.disable()
    try:
        (model(x).sum() + man()).backward()
        assert [ref() for ref in model.seen] == [None, None]  # after a step
        out = model(x)
        del out
        model(2 * x)
        assert [ref() for ref in model.seen[2:4]] == [None, None]  # after a pass that was not measured
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
    man = ActivationNorm(model)
    model(x)
    man.remove()
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert set(vars(model)) == set(vars(Mixed()))
    nodes = [model(x).grad_fn]
    while nodes:
        node = nodes.pop()
        assert "ActivationTap" not in node.name()
        nodes += [n for n, _ in node.next_functions if n is not None]
    with pytest.raises(UserError, match="no forward pass"):
        man()


def test_a_new_one_replaces_the_old(case: tuple[Mixed, ActivationNorm, Tensor]) -> None:
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
    """The mode that an interrupted pass left active counts nothing, even where it cannot be removed."""
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
        (["relu", "secnd"], r"layers: the model has no module 'secnd'; did you mean second\?$"),
        (["zzz"], "layers: the model has no module 'zzz'; there are first, second, third, relu, tanh"),
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
