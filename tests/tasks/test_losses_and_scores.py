"""Every task against a plain computation in float64: losses, scores, their means over a test set, gradients."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedman.data.catalog import PADDING
from fedman.tasks import TASKS, Classification, LanguageModel, MultiLabel, Regression
from fedman.training.evaluate import Evaluator, spread
from tests.federations import network, samples, simulation

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
RNG = np.random.default_rng(0)
B, C, T = 9, 4, 6


def log_softmax(o):
    o = o - o.max(-1, keepdims=True)
    return o - np.log(np.exp(o).sum(-1, keepdims=True))


def classification(o, y):
    log_p = log_softmax(o)
    loss = np.array([-log_p[i, y[i]] for i in range(len(y))])
    return loss, {"accuracy": np.array([100.0 * (o[i].argmax() == y[i]) for i in range(len(y))])}, np.ones(len(y))


def regression(o, y):
    difference = o.reshape(len(y), -1) - y.reshape(len(y), -1)
    return (difference**2).mean(1), {"mae": np.abs(difference).mean(1)}, np.ones(len(y))


def multi_label(o, y):
    p = 1 / (1 + np.exp(-o))
    loss = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean(1)
    right = (p > 0.5) == (y == 1)
    return loss, {"accuracy": 100.0 * right.mean(1), "exact": 100.0 * right.all(1)}, np.ones(len(y))


def language_model(o, y):
    log_p, loss, accuracy, positions = log_softmax(o), [], [], []
    for i in range(len(y)):
        there = [t for t in range(y.shape[1]) if y[i, t] != PADDING]
        positions.append(len(there))
        n = max(1, len(there))
        loss.append(sum(-log_p[i, t, y[i, t]] for t in there) / n)
        accuracy.append(100.0 * sum(o[i, t].argmax() == y[i, t] for t in there) / n)
    return np.array(loss), {"accuracy": np.array(accuracy)}, np.array(positions, float)


TOKENS = RNG.integers(0, C, (B, T))
TOKENS[1, 2:], TOKENS[3], TOKENS[5, 0] = PADDING, PADDING, PADDING  # the end, all, the first
CASES = {
    "classification": (Classification(), classification, (B, C), RNG.integers(0, C, B)),
    "regression": (Regression(), regression, (B, 3), RNG.normal(size=(B, 3))),
    "regression of a number": (Regression(), regression, (B, 1), RNG.normal(size=B)),
    "multi-label": (MultiLabel(), multi_label, (B, C), RNG.integers(0, 2, (B, C))),
    "multi-label, as numbers": (MultiLabel(), multi_label, (B, C), RNG.integers(0, 2, (B, C)).astype(float)),
    "language model": (LanguageModel(), language_model, (B, T, C), TOKENS),
}


def outputs(shape):
    return 2 * np.random.default_rng(1).normal(size=shape)


def test_every_task_has_a_case():
    assert {type(task) for task, *_ in CASES.values()} == set(TASKS.values())


@pytest.mark.parametrize("case", CASES)
def test_loss_and_scores_of_every_sample(case):
    task, plain, shape, target = CASES[case]
    o = outputs(shape)
    loss, scores, weight = plain(o, target)
    given = torch.tensor(o), torch.tensor(target)
    np.testing.assert_allclose(task.loss(*given).numpy(), loss, **CLOSE)
    found = task.scores(*given)
    assert list(found) == list(scores)
    for name, values in scores.items():
        np.testing.assert_allclose(found[name].double().numpy(), values, err_msg=name, **CLOSE)
    np.testing.assert_allclose(task.mean_loss(*given).item(), loss.mean(), **CLOSE)
    ours = task.weight(given[1])
    np.testing.assert_allclose(np.ones(B) if ours is None else ours.numpy(), weight, **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_gradient_of_the_loss(case):
    """Against finite differences of the plain computation."""
    task, plain, shape, target = CASES[case]
    o = outputs(shape)
    given = torch.tensor(o, requires_grad=True)
    (gradient,) = torch.autograd.grad(task.mean_loss(given, torch.tensor(target)), given)
    step = 1e-6
    for i in range(0, o.size, 5):
        up, down = o.copy(), o.copy()
        up.flat[i] += step
        down.flat[i] -= step
        difference = (plain(up, target)[0].mean() - plain(down, target)[0].mean()) / (2 * step)
        assert difference == pytest.approx(gradient.flatten()[i].item(), rel=1e-6, abs=1e-9)


class Rows(nn.Module):
    """Outputs of any shape from five numbers a sample."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.linear = shape, nn.Linear(5, math.prod(shape), dtype=torch.float64)

    def forward(self, x):
        return self.linear(x).relu().unflatten(1, self.shape) - 0.5


FIGURES = {
    "classification": lambda loss, scores: {"accuracy": scores["accuracy"]},
    "regression": lambda loss, scores: {"rmse": math.sqrt(loss), "mae": scores["mae"]},
    "multi-label": lambda loss, scores: {"accuracy": scores["accuracy"], "exact": scores["exact"]},
    "language model": lambda loss, scores: {"accuracy": scores["accuracy"], "perplexity": math.exp(loss)},
}


@pytest.mark.parametrize("batch", [4, 100])
@pytest.mark.parametrize("case", FIGURES)
def test_figures_of_a_test_set(case, batch):
    """The engine's means over batches of any size, by the task's weights: of all positions for a language model."""
    task, plain, shape, target = CASES[case]
    torch.manual_seed(0)
    model, data = Rows(shape[1:]), samples([B])
    data = replace(data, x_test=data.x, y=torch.tensor(target), y_test=torch.tensor(target))
    machine = simulation(model=model, task=task, data=data, chunk=1)
    loss, scores, weight = plain(model(data.x).detach().numpy(), target)
    share = weight / weight.sum()
    want = FIGURES[case](share @ loss, {name: share @ values for name, values in scores.items()})
    from fedman.models.parameters import flatten

    evaluator = Evaluator(machine.backend.executor, data, torch.float64, batch)
    figures, mean = evaluator.grade(evaluator.scores(flatten(model)).tolist())
    assert figures == pytest.approx(want, rel=1e-12)
    assert mean == pytest.approx(share @ loss, rel=1e-12)
    assert next(iter(figures)) == task.headline
    each = evaluator.scores(flatten(model), each=True).tolist()
    assert evaluator.grade(each)[0] == pytest.approx(want, rel=1e-12)
    evaluator.parts = [[0, 4], [], [1, 2, 3, 5, 6, 7, 8]]
    own = evaluator.by_client(each)
    assert len(own) == 2
    assert own[0] == pytest.approx(evaluator.grade([each[0], each[4]])[0][task.headline])
    each[0][0] = each[4][0] = 0.0  # none of their positions counts
    assert evaluator.by_client(each) == own[1:]


def test_sums_that_overflow_are_infinite():
    """As of a model in float64 that is about to diverge."""
    evaluator = Evaluator(simulation(task=Regression()).backend.executor, samples(), torch.float64)
    evaluator.executor.execution.scored = ["mae"]
    assert evaluator.grade([[1.0, 1e308, 1e154]] * 4) == ({"rmse": math.inf, "mae": 1e154}, math.inf)
    assert math.isnan(evaluator.grade([[1.0, math.inf, 1.0], [1.0, -math.inf, 1.0]])[1])
    assert spread([1e308] * 20, higher_is_better=False)["mean"] == math.inf


@pytest.mark.parametrize("higher_is_better", [True, False])
@pytest.mark.parametrize("place", range(4))
def test_a_score_that_is_not_a_number_is_the_worst(higher_is_better, place):
    values = [3.0, 1.0, 2.0]
    values.insert(place, math.nan)
    assert math.isnan(spread(values, higher_is_better)["worst_tenth"])


@pytest.mark.parametrize("case", CASES)
def test_a_step_with_padding_is_one_without(case):
    """The clients of a chunk have batches of one size; samples that are not there have the weight 0."""
    from fedman.execution.base import Batch
    from fedman.execution.one_by_one import OneByOne
    from fedman.execution.vmapped import Vmapped
    from fedman.models.parameters import flatten
    from tests.federations import PENALTY

    task, _, shape, target = CASES[case]
    torch.manual_seed(0)
    shape = shape[1:] if target.ndim > 1 or case == "classification" else (1,)
    model = Rows(shape)
    w, x, y = flatten(model)[None], torch.randn(1, B, 5, dtype=torch.float64), torch.tensor(target)[None]
    share = torch.tensor([[1 / 6] * 6 + [0.0] * 3], dtype=torch.float64)
    for execution in (OneByOne, Vmapped):
        made = execution(model, task, PENALTY, "fp64")
        alone = made.gradient(w, Batch(x[:, :6], y[:, :6]), 0.3)
        for W, rows in ((w, 1), (w.expand(2, -1), 2)):
            padded = made.gradient(W, Batch(*(v.expand(rows, *v.shape[1:]) for v in (x, y, share))), 0.3)
            for one, other in zip(alone, padded, strict=True):
                torch.testing.assert_close(other, one.expand_as(other), **CLOSE)


def test_classification_is_what_it_was():
    """The reference network's own loss, through the engine."""
    data = samples()
    accuracy, loss = simulation(data=data).evaluate(torch.cat([p.detach().flatten() for p in network().parameters()]))
    want, scores, _ = classification(network()(data.x_test).detach().numpy(), data.y_test.numpy())
    assert (accuracy, loss) == pytest.approx((scores["accuracy"].mean(), want.mean()), rel=1e-12)


def test_a_perplexity_beyond_all_numbers_is_finite():
    assert LanguageModel().summarise({"loss": 1e9, "accuracy": 0.0})["perplexity"] == math.exp(700)


class Shifted:
    """A loss to be mixed into a task."""

    def loss(self, output, target):
        return 7 + torch.nn.functional.cross_entropy(output, target, reduction="none")


def test_a_loss_that_is_mixed_in_is_the_one_that_trains():
    given = torch.zeros(4, 3), torch.arange(4) % 3
    first, last = type("First", (Shifted, Classification), {})(), type("Last", (Classification, Shifted), {})()
    assert first.mean_loss(*given).item() == pytest.approx(7 + math.log(3))
    assert last.mean_loss(*given).item() == pytest.approx(math.log(3))


def test_a_subclass_with_other_scores_alone_has_the_loss_it_inherits():
    regression = type("Own", (Regression,), {"scores": lambda self, o, t: {"mae": (o - t).abs().mean(1)}})()
    assert regression.summarise({"loss": 4.0, "mae": 1.0}) == {"rmse": 2.0, "mae": 1.0}
    language = type("Own", (LanguageModel,), {"scores": lambda self, o, t: {"accuracy": o.sum(1)}})()
    assert language.summarise({"loss": 0.0, "accuracy": 1.0}) == {"accuracy": 1.0, "perplexity": 1.0}


@pytest.mark.parametrize("case", CASES)
def test_a_subclass_with_another_loss_is_trained_by_it_and_judged_as_before(case):
    """Its mean is that of its own loss; rmse and perplexity are not computed from it."""
    task, _, shape, target = CASES[case]
    kind = type(task)
    twice = type("Twice", (kind,), {"loss": lambda self, output, target: 2 * kind.loss(self, output, target)})()
    again = type("Again", (type(twice),), {})()
    given = torch.tensor(outputs(shape)), torch.tensor(target)

    def figures(judged):
        found = {"loss": judged.loss(*given), **judged.scores(*given)}
        return judged.summarise({name: float(v.double().mean()) for name, v in found.items()})

    for own in (twice, again):
        np.testing.assert_allclose(own.mean_loss(*given).item(), 2 * task.mean_loss(*given).item(), **CLOSE)
        assert figures(own) == figures(task)
