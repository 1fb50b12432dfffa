"""The penalties of the registry against numpy, in float64; their contract; what is refused."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedman.errors import UserError
from fedman.models import build
from fedman.parts import Registry
from fedman.penalties import (
    MAN,
    PENALTIES,
    ActivationL1,
    FedDecorr,
    HiddenMAN,
    LogitsMAN,
    Penalty,
    attach,
    check_terms,
    mean_squares_of,
)
from fedman.penalties.man import ActivationNorm
from fedman.penalties.measures import mean_square, mean_square_and_variance

Array = np.ndarray


def mlp(p: Mapping[str, Array], x: Array) -> dict[str, Array]:
    """The activations of the MLP by name, in numpy."""
    found: dict[str, Array] = {}
    for i in range(2):
        x = found[f"relus.{i}"] = np.maximum(x @ p[f"linears.{i}.weight"].T + p[f"linears.{i}.bias"], 0)
    return {**found, "output": x @ p["head.weight"].T + p["head.bias"]}


def squares(a: Array, share: Array) -> float:
    return float(sum(p * np.mean(row**2) for p, row in zip(share, a, strict=True)))


def correlation(z: Array, share: Array) -> float:
    """FedDecorr of the features [n, d], feature by feature."""
    d = z.shape[1]
    centred = z - np.average(z, axis=0, weights=share)
    deviation = [np.sqrt(sum(p * v**2 for p, v in zip(share, centred[:, j], strict=True)) + 1e-8) for j in range(d)]
    total = 0.0
    for i in range(d):
        for j in set(range(d)) - {i}:
            covariance = sum(p * a * b for p, a, b in zip(share, centred[:, i], centred[:, j], strict=True))
            total += (covariance / (deviation[i] * deviation[j])) ** 2
    return total / d**2


def reference(name: str, p: Mapping[str, Array], x: Array, share: Array) -> dict[str, float]:
    a = mlp(p, x)
    if name == "feddecorr":
        return {"correlation": correlation(a["relus.1"], share)}
    if name == "activation-l1":
        return {n: float(share @ np.abs(v).mean(1)) for n, v in a.items()}
    chosen = {"man": list(a), "man-hidden": ["relus.0", "relus.1"], "man-logits": ["output"]}[name]
    return {n: squares(a[n], share) for n in chosen}


def stack(models: int = 3) -> tuple[nn.Module, dict[str, Tensor]]:
    model = build("mlp", (5,), 4).double()
    return model, {n: torch.randn(models, *p.shape) / 2 for n, p in model.named_parameters()}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", PENALTIES)
def test_terms_and_gradients_of_stacked_models(name: str, weighted: bool) -> None:
    """Under vmap and grad: each model's terms are numpy's, the gradient is that of the sum of the terms."""
    model, W = stack()
    x = torch.randn(3, 7, 5)
    weight = torch.rand(3, 7).softmax(1) if weighted else None
    attached = attach(PENALTIES[name](zeta=0.1), model)

    def penalty(w: dict[str, Tensor], x: Tensor, weight: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        functional_call(model, w, (x,))
        terms = dict(check_terms(PENALTIES[name](), attached.terms(weight)))
        return torch.stack(list(terms.values())).sum(), terms

    slope, terms = vmap(grad(penalty, has_aux=True), (0, 0, 0 if weighted else None))(W, x, weight)
    for i in range(3):
        p = {n: v[i].numpy() for n, v in W.items()}
        share = np.full(7, 1 / 7) if weight is None else weight[i].numpy()
        expected = reference(name, p, x[i].numpy(), share)
        assert list(terms) == list(expected)
        np.testing.assert_allclose([t[i] for t in terms.values()], list(expected.values()), rtol=1e-10, atol=1e-12)
        direction = {n: np.random.default_rng(0).normal(size=v.shape) for n, v in p.items()}
        ends = [
            sum(reference(name, {n: v + h * direction[n] for n, v in p.items()}, x[i].numpy(), share).values())
            for h in (1e-6, -1e-6)
        ]
        along = sum(float((slope[n][i].numpy() * direction[n]).sum()) for n in p)
        assert along == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", PENALTIES)
def test_samples_of_weight_zero_do_not_count(name: str) -> None:
    model, W = stack(1)
    w = {n: v[0] for n, v in W.items()}
    attached, x = attach(PENALTIES[name](), model), torch.randn(4, 5)
    functional_call(model, w, (torch.cat([x, 100 * torch.ones(3, 5)]),))
    padded = attached.terms(torch.tensor([0.25] * 4 + [0.0] * 3))
    functional_call(model, w, (x,))
    torch.testing.assert_close(dict(padded), dict(attached.terms()), rtol=1e-12, atol=1e-12)
    functional_call(model, w, (x,))  # a client without samples in this step
    assert all(torch.isfinite(t) and t == 0 for t in attached.terms(torch.zeros(4)).values())


def features(z: Tensor) -> dict[str, Tensor]:
    """FedDecorr of features as they are."""
    model = nn.Sequential(nn.Identity(), nn.Linear(z.shape[-1], 2)).to(z.dtype)
    attached = FedDecorr().attach(model)
    model(z)
    return dict(attached.terms())


def test_feddecorr_is_the_correlation_matrix() -> None:
    z = 100 * torch.randn(9, 6)  # so that the 1e-8 does not show
    C = np.corrcoef(z.numpy().T)
    expected = float((C**2).sum() - (np.diag(C) ** 2).sum()) / 36
    assert features(z)["correlation"].item() == pytest.approx(expected, rel=1e-10)
    sequences = z.reshape(3, 3, 6)  # every position is a row
    assert features(sequences)["correlation"].item() == pytest.approx(expected, rel=1e-10)
    half = features(z.bfloat16())["correlation"]
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(expected, rel=1e-2)


def test_feddecorr_of_weighted_sequences() -> None:
    """A sample's share is spread over its positions."""
    z, weight = torch.randn(3, 4, 6), torch.tensor([0.5, 0.3, 0.2])
    model = nn.Linear(6, 2)
    attached = FedDecorr().attach(model)
    model(z)
    expected = correlation(z.reshape(12, 6).numpy(), np.repeat(weight.numpy() / 4, 4))
    assert attached.terms(weight)["correlation"].item() == pytest.approx(expected, rel=1e-10)


def test_feddecorr_and_the_released_code() -> None:
    """The factor that the docstring names."""
    n, d = 64, 7
    z = 100 * np.random.default_rng(0).normal(size=(n, d))
    standard = (z - z.mean(0)) / z.std(0, ddof=1)
    products = standard.T @ standard
    released = (products[~np.eye(d, dtype=bool)] ** 2).mean() / n
    ours = features(torch.tensor(z))["correlation"].item()
    assert released == pytest.approx((n - 1) ** 2 / n * d / (d - 1) * ours, rel=1e-10)
    assert 0.1 * (n - 1) ** 2 / n == pytest.approx(6.2, abs=0.01)


def test_activation_l1_counts_functional_activations() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    model, x = Net(), torch.randn(6, 4)
    hidden = torch.tanh(model.body(x))
    expected = {"tanh#1": hidden.abs().mean(), "output": model.head(hidden).abs().mean()}
    attached = ActivationL1().attach(model)
    model(x)
    torch.testing.assert_close(dict(attached.terms()), expected, rtol=1e-12, atol=1e-12)


def test_feddecorr_of_constant_features() -> None:
    """Dead and constant features have no correlation, and their gradient is finite."""
    z = torch.randn(8, 5)
    z[:, 1], z[:, 3] = 0.0, 3.7
    z.requires_grad_()
    term = features(z)["correlation"]
    (slope,) = torch.autograd.grad(term, z)
    assert slope.isfinite().all()
    C = np.corrcoef(z.detach().numpy()[:, [0, 2, 4]].T)
    assert term.item() == pytest.approx(((C**2).sum() - 3) / 25, rel=1e-6)
    assert features(torch.ones(8, 5))["correlation"] == 0
    assert features(torch.randn(1, 5))["correlation"] == 0


def test_feddecorr_measures_the_layer_that_is_called_last() -> None:
    """Not the one that was defined last."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(6, 2), nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    model, x = Backwards(), torch.randn(9, 4)
    z = model.body(x).detach().numpy()
    attached = FedDecorr().attach(model)
    model(x)
    assert attached.terms()["correlation"].item() == pytest.approx(correlation(z, np.full(9, 1 / 9)), rel=1e-10)
    with pytest.raises(UserError, match="no forward pass"):
        FedDecorr().attach(model).terms()


def test_what_the_kernels_can_serve() -> None:
    assert mean_squares_of(MAN()) == (None, True)
    assert mean_squares_of(MAN(man_logits=False)) == (None, False)
    assert mean_squares_of(HiddenMAN()) == (None, False)
    assert mean_squares_of(LogitsMAN()) == ({}, True)
    layers, output = mean_squares_of(MAN(man_variant="tiny-code", man_logits=False)) or ({}, True)
    assert layers is not None
    assert set(layers) < dict(build("tiny_cnn", (3, 16, 16), 2).named_modules()).keys()
    assert set(layers.values()) == {mean_square, mean_square_and_variance}
    assert not output

    class Own(MAN):
        def attach(self, model: nn.Module) -> ActivationNorm:
            return ActivationNorm(model, ["head"])

    for penalty in (ActivationL1(), FedDecorr(), Own()):
        assert mean_squares_of(penalty) is None


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_the_variance_over_a_batch_of_any_size(samples: int) -> None:
    """The authors' Tiny-ImageNet term: Σ (a − mean)²/(B − 1) by hand; one sample has none, and no gradient of it."""
    a = torch.randn(samples, 3, dtype=torch.float64, requires_grad=True)
    squares = (a.detach() - a.detach().mean(0)).square().sum(0).mean() / max(samples - 1, 1)
    found = mean_square_and_variance(a)(None)
    torch.testing.assert_close(found.detach(), a.detach().square().mean(1) + squares)
    (gradient,) = torch.autograd.grad(found.sum(), a)
    if samples == 1:
        torch.testing.assert_close(gradient, 2 * a.detach() / 3)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_padding_is_not_in_the_batch_whose_variance_counts(samples: int) -> None:
    """With weights the term and its gradient are those of the samples alone; a batch of padding alone has none."""
    padded = torch.randn(samples + 3, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([1 / samples] * samples + [0.0] * 3, dtype=torch.float64)
    term = (weight * mean_square_and_variance(padded)(weight)).sum()
    alone = padded.detach()[:samples].requires_grad_()
    expected = mean_square_and_variance(alone)(None).mean()
    torch.testing.assert_close(term, expected)
    (gradient,), (own,) = torch.autograd.grad(term, padded), torch.autograd.grad(expected, alone)
    torch.testing.assert_close(gradient, torch.cat([own, torch.zeros(3, 3, dtype=torch.float64)]))
    nothing = torch.zeros_like(weight)
    assert not (nothing * mean_square_and_variance(padded)(nothing)).any()


def test_a_measure_of_the_batch_takes_the_rows_of_a_sample_together():
    """With weights as without; what does not fit is one line."""

    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x):
            return self.act(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    model, x = Folded(), torch.randn(4, 3, 5, dtype=torch.float64)
    man = ActivationNorm(model, {"act": mean_square_and_variance}, output=False)
    model(x[:3])
    expected = man()
    model(x[:3])
    torch.testing.assert_close(man(torch.full((3,), 1 / 3, dtype=x.dtype)), expected)
    model(x)
    torch.testing.assert_close(man(torch.tensor([1 / 3, 1 / 3, 1 / 3, 0], dtype=x.dtype)), expected)
    model(x)
    with pytest.raises(UserError, match=r"^weight: shape \(5,\) does not fit layer 'act' with 12 samples"):
        man(torch.ones(5))


def test_variants_belong_to_a_model() -> None:
    MAN().check("mlp")
    MAN(man_variant="tiny-code", man_logits=False).check("tiny_cnn")
    for penalty in (HiddenMAN(), LogitsMAN(), ActivationL1(), FedDecorr()):
        penalty.check("mlp")


def test_the_registry_imports_without_torch() -> None:
    code = "import sys, fedman.penalties; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_packages_can_announce_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [
        importlib.metadata.EntryPoint(name, f"{__name__}:Size", group)
        for name, group in (("own", "fedman.penalties"), ("other", "fedman.tasks"))
    ]
    monkeypatch.setattr("fedman.parts.announced", lambda: importlib.metadata.EntryPoints(there))
    fresh = Registry("penalty", Penalty, PENALTIES.built_in, plural=PENALTIES.group.removeprefix("fedman."))
    assert fresh["own"] is Size
    assert "other" not in fresh


@dataclass(frozen=True)
class Size(Penalty):
    """A penalty of a user's: what it attaches and which terms that returns are given by the test."""

    title = "size"

    def attach(self, model: nn.Module) -> Any:
        return ActivationNorm(model)


def given(attached: Any) -> Penalty:
    class Given(Size):
        def attach(self, model: nn.Module) -> Any:
            return attached(model)

    return Given()


def terms(value: object) -> Callable[[], object]:
    return lambda: check_terms(Size(), value)


def attached(make: Callable[[nn.Module], object]) -> Callable[[], object]:
    return lambda: attach(given(make), nn.Linear(2, 2))


def layers(names: object) -> Callable[[], object]:
    make = lambda model: ActivationNorm(model, names)  # type: ignore[arg-type]  # noqa: E731
    return lambda: attach(given(make), build("mlp", (4,), 2))


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no mapping": (terms(None), "penalty: terms of Size are None, not a mapping from names to scalar tensors"),
    "a tensor": (terms(torch.ones(())), "penalty: terms of Size are a value of type Tensor, not a mapping"),
    "no terms": (terms({}), "penalty: terms of Size are empty; at least one is needed"),
    "not a scalar": (terms({"a": torch.ones(3)}), r"penalty: terms of Size: 'a' has shape \(3,\); a scalar has none"),
    "a number": (terms({"a": 0.5}), "penalty: terms of Size: 'a' is a value of type float, not a scalar tensor"),
    "not a name": (terms({3: torch.ones(())}), r"penalty: terms of Size: 3 is not a name \(a str\)"),
    "whole numbers": (terms({"a": torch.tensor(1)}), "penalty: terms of Size: 'a' has type torch.int64, which has no"),
    "attach returns nothing": (attached(lambda model: None), "Given.attach returned None, not an object with a method"),
    "attach returns terms": (attached(lambda model: {}), "Given.attach returned a value of type dict, not an object"),
    "attach fails": (attached(lambda model: model.convs), r"Given.attach failed for Linear \(AttributeError: 'Linear'"),
    "no such layer": (layers(["relu.0"]), r"^layers: the model has no module 'relu.0'; did you mean relus.0\?$"),
    "no name of a layer": (layers([0]), "layers: the model has no module 0"),
    "a list of modules": (layers(["relus"]), "'relus' is a list of modules and never called itself"),
    "unknown variant": (lambda: MAN(man_variant="large").check("mlp"), "^man_variant: 'large' is not one of formula, "),
    "unknown variant attached": (lambda: attach(MAN(man_variant="x"), nn.Linear(2, 2)), "man_variant: 'x' is not one"),
    "another model's variant": (
        lambda: MAN(man_variant="tiny-code", man_logits=False).check("mlp"),
        "^man_variant: tiny-code belongs to model tiny_cnn$",
    ),
    "variant without logits": (
        lambda: MAN(man_variant="tiny-code").check("tiny_cnn"),
        "^man_variant: tiny-code has no logits term; add man_logits=false$",
    ),
    "variant on another module": (
        lambda: attach(MAN(man_variant="tiny-code"), build("mlp", (4,), 2)),
        r"^layers: the model has no module 'relus.3'; did you mean relus.",
    ),
    "no linear layer": (lambda: attach(FedDecorr(), nn.Conv2d(1, 1, 1)), "FedDecorr needs an nn.Linear, and Conv2d"),
    "unknown penalty": (lambda: PENALTIES["mann"], r"^penalty: no penalty named 'mann'; did you mean man\?$"),
    "not a penalty": (
        lambda: PENALTIES["collections:Counter"],
        "^penalty: collections:Counter is the class Counter, not a subclass of fedman.penalties.Penalty$",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_with_one_line(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_feddecorr_refuses_a_weight_that_does_not_fit() -> None:
    model = nn.Linear(3, 2)
    attached = FedDecorr().attach(model)
    model(torch.randn(4, 3))
    with pytest.raises(UserError, match=r"^weight: shape \(5,\) does not fit features with 4 samples$"):
        attached.terms(torch.ones(5))
