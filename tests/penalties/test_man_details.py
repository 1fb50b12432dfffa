"""Corner cases of ActivationNorm found by mutation testing (`make faults ONLY=mutation`)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.penalties.man import ActivationNorm
from tests.penalties.man_cases import Functional


@pytest.mark.parametrize("module", [nn.Softmin(-1), nn.Softmax(-1), nn.Softmax2d(), nn.LogSoftmax(-1)])
def test_normalisations_of_a_whole_layer_are_no_activations(module: nn.Module) -> None:
    model = nn.Sequential(module, nn.Flatten())
    man = ActivationNorm(model)
    model(torch.randn(2, 3, 4, 4))
    assert list(man.terms()) == ["output"]


def test_an_output_without_axes_is_one_sample() -> None:
    model = Functional(torch.sum)
    man = ActivationNorm(model)
    total = model(torch.randn(5, 4))
    assert man.terms() == {"output": total.square()}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("change", [lambda a: a.add_(1), lambda a: a.__setitem__(0, 1.0)])
def test_an_activation_counts_as_it_was_before_a_change_in_place(change, grad: bool) -> None:
    """And the output, which is the changed one, is a layer of its own."""
    seen = []

    def forward(x: Tensor) -> Tensor:
        a = x.tanh()
        seen[:] = [a.detach().square().mean()]
        alias = a
        change(a)
        seen.append(a.detach().square().mean())
        return alias

    model = Functional(forward)
    man = ActivationNorm(model)
    with torch.set_grad_enabled(grad):
        model(torch.randn(5, 4, dtype=torch.float64, requires_grad=True))
    torch.testing.assert_close(man.terms(), dict(zip(["tanh#1", "output"], seen, strict=True)))


VIEWS = {
    "through a view": lambda a: a[:, 0].add_(1),
    "through a part": lambda a: exec("a[:, 0] += 1", {"a": a}),
    "with a view in use": lambda a: (a.t(), a.add_(1)),
    "with parts in use": lambda a: (a.chunk(2), a.add_(1)),
}


@pytest.mark.parametrize("case", VIEWS)
def test_a_change_that_views_would_not_see_is_refused(case) -> None:
    model = Functional(lambda x: VIEWS[case](x.tanh()))
    ActivationNorm(model)
    with pytest.raises(UserError, match=r"^ActivationNorm: an activation is changed in place through a view, or "):
        model(torch.randn(5, 4, requires_grad=True))


def test_a_view_that_is_not_in_use_is_no_matter() -> None:
    """Nor is one of what was computed from the activation."""

    def forward(x: Tensor) -> Tensor:
        a = x.tanh()
        mean = a.view(-1).mean(0, keepdim=True).view(1, 1)
        return a.add_(mean)

    model, x = Functional(forward), torch.randn(5, 4, requires_grad=True)
    expected = model(x)
    ActivationNorm(model)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_model_that_ends_in_dropout_has_its_output_as_a_layer(grad: bool, inplace: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Dropout(0.5, inplace))
    man = ActivationNorm(model)
    with torch.set_grad_enabled(grad):
        model(torch.randn(5, 4))
    assert list(man.terms()) == ["1", "output"]


def test_a_repeated_use_does_not_take_another_layers_name() -> None:
    """With a module named `relu#2`, the second use of `relu` gets another name."""
    model = nn.Sequential()
    model.add_module("relu", nn.ReLU())
    model.add_module("relu#2", nn.ReLU())

    def forward(x: Tensor) -> Tensor:
        relu, other = model._modules.values()
        assert relu is not None
        assert other is not None
        return relu(relu(other(relu(x)) + 1) + 1)

    model.forward = forward  # type: ignore[method-assign]
    man = ActivationNorm(model, output=False)
    model(torch.randn(5, 4))
    assert list(man.terms()) == ["relu", "relu#2", "relu#3", "relu#4"]


def test_a_failure_in_the_forward_pass_leaves_no_mode_behind() -> None:
    model = Functional(lambda x: x @ x)
    man = ActivationNorm(model)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(2, 3))
    assert torch.overrides._get_current_function_mode() is None
    with pytest.raises(UserError, match="no forward pass"):
        man()


def test_a_copy_starts_afresh_even_in_the_middle_of_a_pass() -> None:
    inside = []

    def function(x: Tensor) -> Tensor:
        inside.append(copy.copy(man))
        return torch.relu(x)

    model = Functional(function)
    man = ActivationNorm(model)
    model(torch.randn(2, 3))
    assert inside[0]._running is None
    man.terms()
    assert set(man.values) == {"relu#1"}
    assert copy.copy(man).values == {}


def test_layers_with_different_numbers_of_samples() -> None:
    model = Functional(lambda x: torch.relu(x)[:2])
    man = ActivationNorm(model)
    x = torch.randn(5, 4)
    out = model(x)
    assert isinstance(out, Tensor)
    terms = man.terms()
    torch.testing.assert_close(terms, {"relu#1": x.relu().square().mean(), "output": out.square().mean()})
