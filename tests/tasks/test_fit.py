"""Data, model and task that do not fit together: one line before training, and nothing is written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import fedman
from fedman.data import Dataset
from fedman.errors import UserError
from fedman.runs.build import on_device
from fedman.tasks import Classification, LanguageModel, MultiLabel, Regression
from fedman.training.check_fit import RESERVED, check_fit

N, T = 12, 6
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(N, 5)).astype(np.float32)
IDS = RNG.integers(0, 7, (N, T))
CLASSES = RNG.integers(0, 4, N)
NUMBERS = RNG.normal(size=(N, 3)).astype(np.float32)
LABELS = RNG.integers(0, 2, (N, 3))


def dataset(x, y, classes=4) -> Dataset:
    return Dataset("mine", x, y, x[:3], y[:3], classes, (0.0,), (1.0,))


class Linear(nn.Module):
    def __init__(self, *shape, inputs=5):
        super().__init__()
        self.shape, self.linear = shape, nn.Linear(inputs, int(np.prod(shape)))

    def forward(self, x):
        return self.linear(x).unflatten(1, self.shape)


class Text(nn.Module):
    def __init__(self, tokens=7, outputs=7):
        super().__init__()
        self.embedding, self.out = nn.Embedding(tokens, 4), nn.Linear(4, outputs)

    def forward(self, x):
        return self.out(self.embedding(x))


class Returns(nn.Module):
    """A model that returns anything."""

    def __init__(self, make):
        super().__init__()
        self.make, self.linear = make, nn.Linear(5, 4)

    def forward(self, x):
        return self.make(self.linear(x))


def fit(task, data, model):
    check_fit(task, data, model, on_device(data, "cpu", False, isinstance(model, Text)))


FITS = {
    "classification": (Classification(), dataset(ROWS, CLASSES), Linear(4)),
    "more outputs than classes": (Classification(), dataset(ROWS, CLASSES), Linear(6)),
    "regression": (Regression(), dataset(ROWS, NUMBERS), Linear(3)),
    "regression of a number": (Regression(), dataset(ROWS, NUMBERS[:, 0]), Linear(1)),
    "multi-label": (MultiLabel(), dataset(ROWS, LABELS), Linear(3)),
    "multi-label, as numbers": (MultiLabel(), dataset(ROWS, LABELS.astype(np.float32)), Linear(3)),
    "language model": (LanguageModel(), dataset(IDS, IDS, 7), Text()),
    "more tokens than the text has": (LanguageModel(), dataset(IDS, IDS, 7), Text(tokens=9, outputs=9)),
}


@pytest.mark.parametrize("case", FITS)
def test_what_fits(case):
    """Also the model that comes from a registry has as many outputs as the task says."""
    task, data, model = FITS[case]
    fit(task, data, model)
    more = {"more outputs than classes": 4, "more tokens than the text has": 7}
    assert task.outputs(data) == more.get(case, [*model.parameters()][-1].numel())


@dataclass(frozen=True)
class TopTwo(Classification):
    """Whether the class is among the two largest outputs."""

    title = "top two"
    headline = "top2"

    def scores(self, output, target):
        return {"top2": 100.0 * (output.topk(2).indices == target[:, None]).any(-1)}


MISFITS = {
    "numbers for classes": (Classification(), ROWS, NUMBERS[:, 0], Linear(4), "targets are float32 of shape ()"),
    "several classes": (Classification(), ROWS, LABELS, Linear(4), "targets are int64 of shape (3,) a sample; class"),
    "too few outputs": (Classification(), ROWS, CLASSES, Linear(3), "gives 3 outputs a sample; 4 classes need 4"),
    "outputs with an axis more": (Classification(), ROWS, CLASSES, Linear(4, 1), "gives outputs of shape 4x1 a sample"),
    "classes for numbers": (Regression(), ROWS, CLASSES, Linear(1), "mine: targets are int64; regression needs float"),
    "too many outputs": (Regression(), ROWS, NUMBERS, Linear(4), "model: gives 4 outputs a sample; the targets need 3"),
    "too few numbers": (Regression(), ROWS, NUMBERS[:, 0], Linear(3), "model: gives 3 outputs a sample; the"),
    "a label 2": (MultiLabel(), ROWS, LABELS + 1, Linear(3), "mine: targets of shape (12, 3) must be [n, labels]"),
    "one label alone": (MultiLabel(), ROWS, LABELS[:, 0], Linear(1), "mine: targets of shape (12,) must be [n, label"),
    "a label without output": (MultiLabel(), ROWS, LABELS, Linear(2), "gives 2 outputs a sample; 3 labels need 3"),
    "rows for text": (LanguageModel(), ROWS, CLASSES, Linear(4), "mine: inputs float32 (12, 5) and targets int64"),
    "a next token alone": (LanguageModel(), IDS, IDS[:, 0], Text(), "mine: inputs int64 (12, 6) and targets int64"),
    "too few tokens": (LanguageModel(), IDS, IDS, Text(outputs=5), "model: gives an output of shape [B, 6, 5]"),
    "a class without output": (Classification(), ROWS, CLASSES + 2, Linear(4), "y_train has targets 2 to 5, which do"),
    "a class for a task of one's own": (TopTwo(), ROWS, CLASSES - 1, Linear(4), "has targets -1 to 2, which do not"),
    "a token without output": (LanguageModel(), IDS, IDS + 9, Text(), "y_train has targets 9 to 15, which do not fit"),
    "an embedding too small": (LanguageModel(), IDS, IDS, Text(tokens=2), "mine: x_train has ids 0 to 6; the model's"),
    "other rows": (Classification(), ROWS, CLASSES, Linear(4, inputs=9), "model: Linear cannot take samples"),
    "a tuple": (Classification(), ROWS, CLASSES, Returns(lambda o: (o, o)), "model: Returns returns tuple for 2"),
    "a sum": (Classification(), ROWS, CLASSES, Returns(torch.sum), "model: Returns returns shape () for 2 samples; a"),
    "a transposed output": (Classification(), ROWS, CLASSES, Returns(torch.t), "model: Returns returns shape (4, 2)"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit(case):
    task, x, y, model, message = MISFITS[case]
    with pytest.raises(UserError) as error:
        fit(task, dataset(x, y, 7 if isinstance(task, LanguageModel) else 4), model)
    (line,) = str(error.value).splitlines()
    assert message in line


def test_a_class_of_the_test_set_without_an_output():
    data = Dataset("mine", ROWS, CLASSES, ROWS[:3], np.array([0, 1, 9]), 4, (0.0,), (1.0,))
    with pytest.raises(UserError, match=r"^mine: y_test has targets 0 to 9, which do not fit outputs \(4,\) a sample"):
        fit(Classification(), data, Linear(4))


@dataclass(frozen=True)
class Own(Classification):
    """A task of a user, which may be wrong in many ways."""


def own(**methods):
    return dataclass(frozen=True)(type("Own", (Own,), methods))()


def scores(**values):
    return lambda self, output, target: {name: make(output) for name, make in values.items()}


WRONG = {
    "a mean for a loss": (own(loss=lambda self, o, y: o.mean()), "task: Own's loss has shape () for 2 samples; one"),
    "a loss of every output": (own(loss=lambda self, o, y: o), "task: Own's loss has shape (2, 4) for 2 samples; one"),
    "a loss that fails": (own(loss=lambda self, o, y: o @ o), "task: Own fails for outputs (4,) and targets () "),
    "a number for a score": (own(scores=scores(accuracy=lambda o: 1.0)), "task: Own's accuracy has float for 2"),
    "a score of a batch": (own(scores=scores(accuracy=torch.mean)), "task: Own's accuracy has shape () for 2 samples"),
    "no headline": (own(scores=scores(f1=lambda o: o[:, 0])), "task: the headline 'accuracy' is not one of"),
    "another headline": (own(headline="f1"), "task: the headline 'f1' is not one of Own's figures: accuracy"),
    "a weight of every output": (own(weight=lambda self, y: torch.ones(2, 4)), "task: Own's weight has shape (2, 4)"),
    "figures of nothing": (own(summarise=lambda self, means: None), "task: Own.summarise gives no numbers by name (A"),
    "figures that fail": (own(summarise=lambda self, means: means["f1"]), "Own.summarise gives no numbers by name (K"),
    "words for figures": (own(summarise=lambda self, means: {"accuracy": "high"}), "Own.summarise gives no numbers by"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_tasks_that_break_their_contract(case):
    task, message = WRONG[case]
    with pytest.raises(UserError) as error:
        fit(task, dataset(ROWS, CLASSES), Linear(4))
    (line,) = str(error.value).splitlines()
    assert message in line


@pytest.mark.parametrize("name", RESERVED)
def test_names_of_scores_that_records_use_otherwise(name):
    task = own(scores=scores(accuracy=lambda o: o[:, 0], **{name: lambda o: o[:, 0]}))
    with pytest.raises(UserError, match=f"^task: a figure cannot be called {name}, which records have"):
        fit(task, dataset(ROWS, CLASSES), Linear(4))


def test_the_model_is_left_as_it_was():
    """The trial draws no random numbers of the run and leaves no gradients."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5))
    before = torch.random.get_rng_state()
    fit(Classification(), dataset(ROWS, CLASSES), model)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("y", "task", "message"),
    [
        (NUMBERS, "classification", "classification needs a whole number, the class; name task=regression"),
        (CLASSES, "regression", "regression needs floating-point numbers"),
        (CLASSES, "multi-label", r"must be \[n, labels\], each 0 or 1"),
        (CLASSES, "language-model", r"must both be ids \[n, T\]"),
    ],
)
def test_a_run_is_refused_before_anything_is_written(y, task, message, tmp_path):
    with pytest.raises(UserError, match=message):
        fedman.run(dataset=(ROWS, y, ROWS, y), task=task, clients=2, rounds=1, partition="iid", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_test_set_without_a_position_that_counts_is_refused():
    with pytest.raises(UserError, match="custom: all targets of the test set are -1; none of its positions counts"):
        fedman.run(dataset=(IDS, IDS, IDS, np.full_like(IDS, -1)), model=Text(), task="language-model", clients=2)


@pytest.mark.parametrize(
    ("y", "task", "figures"),
    [(NUMBERS, "regression", ["rmse", "mae"]), (LABELS, "multi-label", ["accuracy", "exact"])],
)
def test_a_run_of_every_task_has_its_figures(y, task, figures):
    result = fedman.run(dataset=(ROWS, y, ROWS, y), task=task, clients=2, participation=1.0, rounds=2, partition="iid")
    for record in result.rounds:
        assert [name for name in record if name in (*figures, "accuracy", "rmse")] == figures
    assert result.headline == result.rounds[-1][figures[0]]["all"]


@pytest.mark.parametrize("root", [np.sqrt, lambda mean: torch.tensor(mean).sqrt()])
def test_figures_computed_by_numpy_or_torch_are_numbers(root, tmp_path):
    """In the records, the summary and the result; not-quite-numbers were no figures there."""
    task = dataclass(frozen=True)(
        type("Own", (Classification,), {"summarise": lambda self, means: {"accuracy": root(means["accuracy"])}})
    )()
    result = fedman.run(
        dataset=(ROWS, CLASSES, ROWS, CLASSES), task=task, clients=2, participation=1.0, rounds=1, partition="iid"
    )
    figures = [each["accuracy"]["all"] for each in (result.summary, result.rounds[-1])]
    assert [type(value) for value in figures] == [float, float]
    assert result.headline == pytest.approx(figures[0])


def test_a_task_of_a_user():
    """Classification with another score, by its name: module:Name."""
    keys = {"clients": 2, "participation": 1.0, "rounds": 2, "partition": "iid"}
    given = (ROWS, CLASSES, ROWS, CLASSES)
    own = fedman.run(dataset=given, task="tests.tasks.test_fit:TopTwo", **keys)
    plain = fedman.run(dataset=given, **keys)
    assert [r["loss"] for r in own.rounds] == [r["loss"] for r in plain.rounds]
    assert own.rounds[-1]["top2"]["all"] >= plain.accuracy
    assert (own.headline, own.summary["headline"]) == (own.rounds[-1]["top2"]["all"], "top2")


def test_a_task_is_tried_in_the_precision_of_the_run():
    """One with constants in float32 cannot weigh outputs in float64."""
    weight = torch.tensor([1.0, 2.0, 3.0])
    own = {"loss": lambda self, o, t: torch.nn.functional.cross_entropy(o, t, weight=weight, reduction="none")}
    x, y = np.zeros((9, 4), np.float32), np.arange(9) % 3
    keys = {
        "dataset": (x, y, x, y),
        "task": type("Weighted", (Classification,), own)(),
        "partition": "iid",
        "clients": 3,
    }
    fedman.run(**keys, rounds=1, precision="fp32")
    with pytest.raises(UserError, match=r"^task: Weighted fails for outputs .*expected scalar type Double"):
        fedman.run(**keys, rounds=1, precision="fp64")


def test_no_figure_can_have_the_name_of_something_else_in_a_record():
    from fedman.runs.records import Divergence, RoundRecord, Summary
    from fedman.training.check_fit import RESERVED

    names = {name for kind in (RoundRecord, Summary, Divergence) for name in kind.__annotations__}
    assert names - set(RESERVED) == {"accuracy"}
    assert {"sum", "man"} <= set(RESERVED)  # of a line in a file, and in records of earlier versions


class Positions(torch.nn.Module):
    """Images whose patches have learned positions: an embedding that is not of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.position, self.head = torch.nn.Linear(4, 8), torch.nn.Embedding(4, 8), torch.nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(len(x), -1, 4)[:, :4]
        return self.head((self.patch(patches) + self.position(torch.arange(4))).mean(1))


def test_an_embedding_that_is_not_of_the_input_is_fine():
    small = {"clients": 4, "participation": 0.5, "rounds": 1, "epochs": 1, "device": "cpu"}
    assert fedman.run(model=Positions(), **small).accuracy >= 0


class LooksUp(nn.Module):
    """A table that is no `nn.Embedding`."""

    def __init__(self, look):
        super().__init__()
        self.table, self.look, self.out = nn.Parameter(torch.randn(7, 4)), look, nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.look(self.table, x).mean(1))


@pytest.mark.parametrize("look", [lambda w, x: nn.functional.embedding(x, w), lambda w, x: w[x]], ids=["call", "index"])
def test_ids_that_are_not_known_as_such_get_a_hint(look):
    arrays = IDS, CLASSES, IDS, CLASSES
    with pytest.raises(UserError, match=r"say from_arrays\(\.\.\., ids=True\) if they are ids$"):
        fit(Classification(), fedman.data.from_arrays(*arrays), LooksUp(look))
    fit(Classification(), fedman.data.from_arrays(*arrays, ids=True), LooksUp(look))
    with pytest.raises(UserError, match=r"cannot take samples of shape \(5,\) \([^;]*\)$"):
        fit(Classification(), dataset(ROWS, CLASSES), Linear(4, inputs=3))
