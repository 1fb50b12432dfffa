"""`fedman.run` with names and with objects; `fedman.Result`; the names that `fedman` has."""

import inspect
import json
import subprocess
import sys
import types
from dataclasses import dataclass
from typing import Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

import fedman
from fedman import api
from fedman.algorithms import ALGORITHMS
from fedman.config import KEYS, PARTS, Config, resolve
from tests.runs.killed import run_killed

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
Z = X @ np.array([[1.0], [-2.0], [0.5], [0.0]], dtype=np.float32)
ARRAYS, NUMBERS = (X, Y, X, Y), (X, Z, X, Z)
QUICK = {"participation": 1.0, "rounds": 2, "epochs": 1, "device": "cpu"}
SMALL = {"dataset": ARRAYS, "clients": 3, "partition": "iid", **QUICK}


def same(one, other):
    return all(torch.equal(one.models["all"][name], w) for name, w in other.models["all"].items())


def told(**given):
    with pytest.raises(fedman.UserError) as error:
        fedman.run(**given)
    return str(error.value)


# the signature


def types_of(hint):
    """The types of a union, without None."""
    several = get_origin(hint) in (Union, types.UnionType)
    return {kind for kind in (get_args(hint) if several else (hint,)) if kind is not types.NoneType}


def test_every_key_is_a_parameter_of_its_type_and_none_is_the_default():
    given, wanted = get_type_hints(api.run), get_type_hints(Config)
    parameters = inspect.signature(fedman.run).parameters
    options = {"preset", "out", "resume", "device", "progress", "hyper"}
    assert set(parameters) == set(KEYS) | options
    for key in KEYS:
        assert parameters[key].default is None
        assert parameters[key].kind is inspect.Parameter.KEYWORD_ONLY
        assert types_of(wanted[key]) <= types_of(given[key]), key
        if key not in (*PARTS, "dataset", "model", "partition", "data_dir"):
            assert types_of(wanted[key]) == types_of(given[key]), key
    for kind, registry in PARTS.items():
        assert types_of(given[kind]) == {str, registry.base}


def test_none_means_the_default():
    plain = fedman.run(**SMALL)
    nones = {**dict.fromkeys(KEYS), "alpha": None, **SMALL}
    assert fedman.run(**nones).summary["config"] == plain.summary["config"]


# parts as instances


def test_an_instance_is_its_name_and_hyperparameters():
    parts = {
        "algorithm": fedman.FedProx(mu=0.5),
        "penalty": fedman.MAN(0.3, man_logits=False),
        "optimizer": fedman.SGD(momentum=0.5),
        "task": fedman.Classification(),
    }
    names = {
        "algorithm": "fedprox", "mu": 0.5, "penalty": "man", "zeta": 0.3, "man_logits": False,
        "optimizer": "sgd", "momentum": 0.5, "task": "classification",
    }  # fmt: skip
    by_object, by_name = fedman.run(**SMALL, **parts), fedman.run(**SMALL, **names)
    assert by_object.summary["config"] == by_name.summary["config"]
    assert by_object.summary["method"] == "FedProx+MAN"
    assert same(by_object, by_name)
    assert fedman.run(**SMALL, algorithm=fedman.FedProx(mu=0.5), mu=0.5).summary["config"]["mu"] == 0.5


def test_an_instance_takes_precedence_over_a_preset():
    found = fedman.run(preset="digits", penalty=fedman.MAN(0.2), algorithm=fedman.FedDC(), rounds=1, device="cpu")
    assert found.summary["config"]["zeta"] == 0.2
    assert found.summary["config"]["alpha"] == 0.01


def test_numpy_numbers_are_numbers(tmp_path):
    found = fedman.run(**{**SMALL, "rounds": np.int64(1)}, seed=np.arange(3)[2], zeta=np.float32(0.5), out=tmp_path)
    assert found.summary["config"]["seed"] == 2
    assert found.summary["config"]["zeta"] == 0.5


# data and clients


@pytest.mark.parametrize(
    "dataset",
    [
        ARRAYS,
        tuple(map(torch.as_tensor, ARRAYS)),
        fedman.data.from_arrays(*ARRAYS, name="mine"),
        (torch.utils.data.TensorDataset(*map(torch.as_tensor, (X, Y))),) * 2,
        {"train": (X, Y), "test": (X, Y)},
    ],
    ids=["arrays", "tensors", "Dataset", "torch", "halves"],
)
def test_data_in_any_form(dataset):
    found = fedman.run(**{**SMALL, "dataset": dataset})
    assert found.summary["config"]["dataset"] == "custom"
    assert same(found, fedman.run(**SMALL))


def read_only(array):
    """As memory-mapped files and other libraries' arrays are."""
    array = array.copy()
    array.flags.writeable = False
    return array


def test_arrays_that_are_only_read(recwarn):
    torch.set_warn_always(True)  # otherwise told once a process
    try:
        found = fedman.run(**{**SMALL, "dataset": tuple(map(read_only, ARRAYS))})
    finally:
        torch.set_warn_always(False)
    assert not [str(each.message) for each in recwarn if "not writable" in str(each.message)]
    assert same(found, fedman.run(**SMALL))


def test_a_file_as_a_path(tmp_path):
    np.savez(tmp_path / "mine.npz", **dict(zip(("x_train", "y_train", "x_test", "y_test"), ARRAYS, strict=True)))
    found = fedman.run(**{**SMALL, "dataset": tmp_path / "mine.npz"})
    assert found.summary["config"]["dataset"] == str(tmp_path / "mine.npz")
    assert same(found, fedman.run(**SMALL))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru, self.head = nn.Embedding(7, 3), nn.GRU(3, 6, batch_first=True), nn.Linear(6, 7)

    def forward(self, ids):
        return self.head(self.gru(self.embedding(ids))[0])


TOKENS = np.random.default_rng(1).integers(0, 7, (60, 5))


@pytest.mark.parametrize(
    ("task", "targets", "given", "figures"),
    [
        (fedman.Regression(), Z, {}, ["rmse", "mae"]),
        (fedman.Regression(), Z[:, 0], {}, ["rmse", "mae"]),
        (fedman.MultiLabel(), (X[:, :3] > 0).astype(int), {}, ["accuracy", "exact"]),
        (fedman.LanguageModel(), TOKENS[:, 1:], {"model": Recurrent()}, ["accuracy", "perplexity"]),
    ],
    ids=["regression", "of one number", "multi-label", "language-model"],
)
def test_every_task(task, targets, given, figures):
    inputs = TOKENS[:, :-1] if "model" in given else X
    found = fedman.run(**{**SMALL, "dataset": (inputs, targets, inputs, targets), "task": task, **given})
    assert found.headline == found.summary[figures[0]]["all"]
    assert all(np.isfinite(found.summary[name]["cloud"]) for name in figures)


@pytest.mark.parametrize(
    ("targets", "given", "task"),
    [
        (Y, {}, None),
        (Z, {}, "regression"),
        (Z[:, 0], {}, "regression"),
        ((X > 0).astype(int), {}, "multi-label"),
        ((X > 0).astype(np.float32), {}, "multi-label"),
        (TOKENS[:, 1:], {"model": Recurrent()}, "language-model"),
    ],
    ids=["classes", "numbers", "a number", "labels", "labels as numbers", "ids"],
)
def test_the_task_is_that_of_the_targets(targets, given, task):
    """Where the user names none; the partition is then one that such targets have."""
    inputs = TOKENS[:, :-1] if "model" in given else X
    found = fedman.run(dataset=(inputs, targets, inputs, targets), clients=3, **QUICK, **given).summary["config"]
    assert found.get("task") == task
    assert found["partition"] == ("iid" if task else "dir0.3")


@pytest.mark.parametrize(
    ("inputs", "targets", "advice"),
    [
        (X, np.eye(2, dtype=int)[Y], "give the classes, y.argmax(1), or name task=multi-label"),
        (X, Y[:, None], "give the classes, y.ravel()"),
        (X, Y.astype(float), "give the classes as whole numbers, y.astype(int), or name task=regression"),
        ((X > 0).astype(int), (X > 0).astype(int), "name task=multi-label or task=language-model"),
        (X, TOKENS, "name a task of your own"),
    ],
    ids=["one-hot", "a column", "floating-point classes", "two letters or labels", "ids of nothing"],
)
def test_targets_that_do_not_say_the_task(inputs, targets, advice):
    data = (inputs, targets, inputs, targets)
    assert told(dataset=data, clients=3, **QUICK) == f"task: the targets do not say which; {advice}"
    assert told(dataset=data, clients=3, task="classification", **QUICK).endswith(f"the class; {advice}")


def test_the_task_of_files_is_named_and_then_the_partition_is_right(tmp_path):
    """What files hold is not known when keys are checked: one line says what to name."""
    np.savez(tmp_path / "my.npz", x_train=X, y_train=Z, x_test=X, y_test=Z)
    keys = {"dataset": f"npz:{tmp_path}/my.npz", "clients": 3, **QUICK}
    assert told(**keys).endswith("classification needs a whole number, the class; name task=regression")
    assert fedman.run(**keys, task="regression").summary["config"]["partition"] == "iid"


def test_ids_of_bytes_are_ids():
    """A vocabulary of at most 256 tokens: the model's embedding looks them up as any other whole numbers."""
    task, model = fedman.LanguageModel(), Recurrent()
    wide, bytes_ = ((x[:, :-1], x[:, 1:], x[:, :-1], x[:, 1:]) for x in (TOKENS, TOKENS.astype(np.uint8)))
    found, wanted = (fedman.run(**{**SMALL, "dataset": d, "task": task, "model": model}) for d in (bytes_, wide))
    assert same(found, wanted)


def test_a_partition_as_list_owners_or_function():
    """All say the same, and that is what is trained: with one client's samples alone it is another run."""
    parts = [np.arange(0, 60, 3), np.arange(1, 60, 3), np.arange(2, 60, 3)]

    def turns(labels, clients, seed):
        assert len(labels) == 60
        assert (clients, seed) == (3, 7)
        return np.arange(60) % clients

    keys = {"dataset": ARRAYS, **QUICK}
    by_list = fedman.run(**keys, partition=parts)
    assert by_list.summary["config"]["clients"] == 3
    assert by_list.summary["config"]["partition"] == f"custom-{fedman.data.fingerprint(parts)}"
    assert same(by_list, fedman.run(**keys, partition=np.arange(60) % 3))
    assert same(by_list, fedman.run(**keys, partition=turns, clients=3, partition_seed=7))
    assert not same(by_list, fedman.run(**keys, partition=[np.arange(20), np.arange(20, 40), np.arange(40, 60)]))
    assert fedman.run(partition=[range(9)], **QUICK).summary["config"]["dataset"] == "digits"


def test_clients_of_the_data_are_the_clients_of_the_run():
    held = {"ann": (X[:30], Y[:30], X[30:32], Y[30:32]), "bob": (X[30:], Y[30:], X[:9], Y[:9])}
    data = fedman.data.from_clients(held)
    found = fedman.run(dataset=data, **QUICK)
    assert (found.summary["config"]["partition"], found.summary["config"]["clients"]) == ("natural", 2)
    assert len(found.summary["clients"]["each"]) == 2
    assert same(found, fedman.run(dataset=data, partition=[np.arange(30), np.arange(30, 60)], **QUICK))
    other = fedman.run(dataset=data, partition="iid", clients=5, **QUICK).summary["config"]
    assert (other["partition"], other["clients"]) == ("iid", 5)


def test_other_clients_models_are_not_tested_with_the_datas_own_test_sets():
    """With batch-norm of their own: client 0 of `iid` is not ann."""
    held = {"ann": (X[:30], Y[:30], X[30:32], Y[30:32]), "bob": (X[30:], Y[30:], X[:9], Y[:9])}
    model = nn.Sequential(nn.Linear(X.shape[1], 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    keys = {"dataset": fedman.data.from_clients(held), "model": model, "batch_norm": "local", **QUICK}
    assert len(fedman.run(**keys).summary["clients"]["each"]) == 2
    assert "clients" not in fedman.run(**keys, partition="iid", clients=2).summary


def test_clients_that_files_name_are_the_clients_of_the_run(tmp_path):
    users = {name: {"x": X[:n].tolist(), "y": Y[:n].tolist()} for name, n in (("ann", 20), ("bob", 30), ("eve", 10))}
    text = {"users": list(users), "num_samples": [len(u["y"]) for u in users.values()], "user_data": users}
    (tmp_path / "people.json").write_text(json.dumps(text))
    (tmp_path / "parts.json").write_text("[[0, 1], [2, 3]]")
    people = f"leaf:{tmp_path / 'people.json'}"
    for given, wanted in (
        ({"dataset": people}, ("natural", 3)),
        ({"dataset": people, "partition": "iid"}, ("iid", 100)),
        ({"partition": f"file:{tmp_path / 'parts.json'}"}, (f"file:{tmp_path / 'parts.json'}", 2)),
        ({"partition": "iid", "clients": 7}, ("iid", 7)),
    ):
        config = resolve(given)
        assert (config.partition, config.clients) == wanted
    found = fedman.run(dataset=people, **QUICK)
    assert len(found.summary["clients"]["each"]) == 3
    assert "has 3 parts for 5 clients" in told(dataset=people, clients=5, **QUICK)


def test_a_run_with_a_partition_of_its_own_is_resumed(tmp_path):
    keys = {"dataset": ARRAYS, "partition": [np.arange(40), np.arange(40, 60)], **QUICK, "checkpoint_seconds": 0.0}

    run_killed(1, **keys, out=tmp_path)
    played = []
    found = fedman.run(**keys, out=tmp_path, resume=True, progress=lambda r: played.append(r["round"]))
    assert played == [2]
    assert same(found, fedman.run(**keys))
    other = {**keys, "partition": [np.arange(30), np.arange(30, 60)]}
    assert "partition" in told(**other, out=tmp_path, resume=True)


# bad input: one line each, which names the part and what is wanted


class NoDataclass(fedman.FedAvg):
    beta: float = 0.5


@dataclass(frozen=True)
class NoDefault(fedman.FedAvg):
    beta: float


@dataclass(frozen=True)
class ListField(fedman.FedAvg):
    betas: tuple = (1, 2)


@dataclass(frozen=True)
class NamedLikeAKey(fedman.FedAvg):
    lr: float = 0.5


@dataclass(frozen=True)
class NoTitle(fedman.Algorithm):
    def step(self, w, grad, server, client, hp):
        return fedman.descend(w, grad(w), hp)


@dataclass(frozen=True)
class WritesToItsInput(fedman.FedAvg):
    def step(self, w, grad, server, client, hp):
        return w.sub_(grad(w))


@dataclass(frozen=True)
class WrongShape(fedman.FedAvg):
    def step(self, w, grad, server, client, hp):
        return w.sum()


@dataclass(frozen=True)
class ForgetsAVector(fedman.FedAvg):
    server = ("w", "m")


@dataclass(frozen=True)
class Raises(fedman.FedAvg):
    def update(self, server, mean, fraction):
        raise KeyError("momentum")


@dataclass(frozen=True)
class MeanLoss(fedman.Classification):
    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target)


@dataclass(frozen=True)
class OtherHeadline(fedman.Classification):
    headline = "f1"


@dataclass(frozen=True)
class NoHeadline(fedman.Task):
    title = "unnamed"

    def loss(self, output, target):
        return output[:, 0]

    def scores(self, output, target):
        return {"value": output[:, 0]}


@dataclass(frozen=True)
class ReservedScore(fedman.Classification):
    def scores(self, output, target):
        return {**super().scores(output, target), "seconds": output[:, 0]}


@dataclass(frozen=True)
class NoTerms(fedman.Penalty):
    title = "nothing"

    def attach(self, model):
        class Empty:
            def terms(self, weight=None):
                return {}

        return Empty()


@dataclass(frozen=True)
class NotAttached(fedman.Penalty):
    title = "nothing"

    def attach(self, model):
        return None


@dataclass(frozen=True)
class NoUpdate(fedman.LocalOptimizer):
    title = "none"


def broken(labels, clients, seed):
    return labels / "two"


LINES = nn.Sequential(nn.Linear(4, 2))
BAD = [
    # what is given beside SMALL, and what the message must say
    ({"algorithm": fedman.FedAvg}, "algorithm: FedAvg is a class; give an instance, FedAvg(...)"),
    ({"algorithm": 3}, "algorithm: int is not a subclass of fedman.algorithms.Algorithm"),
    ({"algorithm": fedman.MAN()}, "algorithm: MAN is not a subclass of fedman.algorithms.Algorithm"),
    ({"optimizer": torch.optim.SGD}, "SGD is not a subclass of fedman.optimizers.LocalOptimizer; did you mean sgd?"),
    ({"optimizer": torch.optim.Adam(nn.Linear(1, 1).parameters())}, "LocalOptimizer; did you mean adam?"),
    ({"optimizer": torch.optim.RMSprop}, "optimizer: RMSprop is not a subclass of fedman.optimizers.LocalOptimizer"),
    ({"algorithm": "fednova"}, "algorithm: no algorithm named 'fednova'; there are fedavg, "),
    ({"optimizer": fedman.FedAvg()}, "optimizer: FedAvg is not a subclass of fedman.optimizers.LocalOptimizer"),
    ({"algorithm": "fedavgg"}, "algorithm: no algorithm named 'fedavgg'; did you mean fedavg?"),
    ({"algorithm": "nowhere.at_all:Mine"}, "nowhere.at_all:Mine cannot be imported (ModuleNotFoundError: No module"),
    ({"algorithm": "tests.test_api:Mine"}, "algorithm: tests.test_api has no Mine"),
    ({"algorithm": "tests.test_api:broken"}, "algorithm: tests.test_api:broken is a function, not a subclass of"),
    ({"algorithm": fedman.FedProx(mu=0.1), "mu": 0.2}, "mu: 0.2 is not that of algorithm=FedProx(mu=0.1); leave one"),
    ({"penalty": fedman.MAN(0.1), "zeta": 0.2}, "zeta: 0.2 is not that of penalty=MAN(zeta=0.1, "),
    ({"algorithm": fedman.FedProx(mu=-1.0)}, "mu: should be greater than or equal to 0, not -1.0"),
    ({"algorithm": fedman.FedProx(mu="much")}, "mu: should be a number"),
    ({"algorithm": NoDataclass()}, "NoDataclass is not a dataclass; put @dataclass(frozen=True) before it"),
    ({"algorithm": NoDefault(0.1)}, "beta of tests.test_api:NoDefault has no default"),
    ({"algorithm": ListField()}, "betas of tests.test_api:ListField is "),
    ({"algorithm": NamedLikeAKey()}, "hyper-parameter lr has the name of a key of every run; rename it"),
    ({"algorithm": NoTitle()}, "algorithm: tests.test_api:NoTitle does not define title"),
    ({"algorithm": WritesToItsInput()}, "algorithm: WritesToItsInput writes to its input w"),
    ({"algorithm": WrongShape()}, "algorithm: WrongShape.step returns w with shape ()"),
    ({"algorithm": ForgetsAVector()}, "ForgetsAVector.update returns the vectors w; wanted is m, w"),
    ({"algorithm": Raises()}, "algorithm: Raises.update fails (KeyError: 'momentum')"),
    ({"algorithm": fedman.Scaffold(), "optimizer": fedman.Adam()}, "the formulas of scaffold presume plain SGD"),
    ({"task": MeanLoss()}, "task: MeanLoss's loss has shape () for 2 samples; one number a sample is wanted"),
    ({"task": OtherHeadline()}, "task: the headline 'f1' is not one of OtherHeadline's figures: accuracy"),
    ({"task": NoHeadline()}, "task: tests.test_api:NoHeadline does not define headline, higher_is_better"),
    ({"task": ReservedScore()}, "task: a figure cannot be called seconds"),
    ({"task": fedman.Regression()}, "targets are int64; regression needs floating-point numbers"),
    ({"task": fedman.LanguageModel()}, "must both be ids [n, T]"),
    ({"dataset": NUMBERS, "task": "classification"}, "needs a whole number, the class; name task=regression"),
    ({"dataset": (X, np.eye(2)[Y]) * 2}, "task: the targets do not say which; give the classes, y.argmax(1), or name"),
    ({"penalty": NoTerms(0.1)}, "penalty: terms of NoTerms are empty; at least one is needed"),
    ({"penalty": NotAttached(0.1)}, "penalty: NotAttached.attach returned None"),
    ({"optimizer": "tests.test_api:NoUpdate"}, "optimizer: tests.test_api:NoUpdate does not define update"),
    ({"model": nn.Linear}, "model: <class 'torch.nn.modules.linear.Linear'> is neither a name nor an nn.Module"),
    ({"model": nn.Linear(4, 1)}, "model: gives 1 output a sample; 2 classes need 2"),
    ({"model": nn.Linear(3, 2)}, "model: Linear cannot take samples of shape (4,)"),
    ({"model": nn.LSTM(4, 2)}, "model: LSTM returns tuple for 2 samples"),
    ({"model": "tests.test_api:LINES"}, "model: tests.test_api:LINES"),
    ({"model": "mpl"}, "model: no model named 'mpl'; did you mean mlp?"),
    ({"partition": [[0, 1], [1, 2], [3]]}, "partition: clients 0 and 1 both have sample 1"),
    ({"partition": [[0, 1], [], [3]]}, "partition: client 1: has no samples"),
    ({"partition": [[0, 1], [2], [60]]}, "partition: client 2: has sample 60; the samples are 0 to 59"),
    ({"partition": [[0, 1], [2]]}, "partition: has 2 parts for 3 clients"),
    ({"partition": np.zeros(5, int)}, "partition: has 5 client numbers for 60 training samples"),
    ({"partition": {0: [1]}}, "partition: is dict; wanted is a list of index arrays"),
    ({"partition": 3}, "partition: should be a valid string, not 3"),
    ({"partition": broken}, "partition: the function raised "),
    ({"partition": lambda y, n, s: [[0]] * n}, "partition: clients 0 and 1 both have sample 0"),
    ({"partition": "natural"}, "partition: natural is not possible, custom has no clients of its own"),
    ({"partition": [[0], [1], [2]], "unbalanced": 0.5}, "unbalanced: 0.5 is not possible with partition"),
    ({"dataset": 3}, "is int; wanted is a Dataset; arrays"),
    ({"dataset": (X, Y, X)}, "is tuple of 3; wanted is a Dataset"),
    ({"dataset": (X, Y[:-1], X, Y)}, "x_train"),
    ({"dataset": {"train": (X, Y)}}, "has train; wanted are train and test"),
    ({"preset": "digits"}, "dataset: 'custom' is not that of the preset, digits; leave one of them out"),
    ({"preset": "paper"}, "preset: no preset named 'paper'"),
    ({"preset": ["digits"]}, "preset: no preset named"),
    ({"beta": 0.9}, "beta: no such key"),
    ({"alpha": 0.9}, "alpha: fedavg has no such hyper-parameter"),
    ({"rounds": [3]}, "rounds: should be a whole number, not [3]"),
    ({"rounds": 0}, "rounds: should be greater than or equal to 1, not 0"),
    ({"algorithm": fedman.FedProx(), "mu": np.ones(2)}, "mu: array([1., 1.]) is not that of algorithm=FedProx("),
    ({"resume": True}, "resume: name the run's folder with out"),
    ({"out": 3}, "out: 3 is not the path of a folder"),
    ({"out": ""}, "out: '' is not the path of a folder"),
    ({"progress": "bar"}, "progress: 'bar' is not a function of a record"),
    ({"device": "tpu"}, "device: 'tpu' is not one of auto, cpu, cuda"),
    ({"device": torch.device("cpu")}, "device: \"device(type='cpu')\" is not one of auto, cpu, cuda"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), BAD, ids=[f"{next(iter(g))}-{i}" for i, (g, _) in enumerate(BAD)])
def test_bad_input(tmp_path, given, message):
    text = told(**{**SMALL, "out": tmp_path / "run" if given != {"resume": True} else None, **given})
    assert message in text
    assert "\n" not in text
    assert len(text) < 400
    assert not (tmp_path / "run").exists()


def test_all_mistakes_at_once():
    text = told(
        dataset=3, model=3, algorithm=fedman.FedAvg, task="nope", penalty=fedman.MAN(0.1), zeta=0.2, rounds=0,
        optimizer=fedman.MAN(), resume=True, progress=1, device="tpu", preset="none", foo=3,
    )  # fmt: skip
    lines = text.split("\n")
    assert lines[0] == "12 mistakes"
    keys = {line.split(":")[0] for line in lines[1:]}
    assert keys == {
        "custom", "model", "algorithm", "task", "zeta", "rounds", "optimizer", "resume", "progress", "device",
        "preset", "foo",
    }  # fmt: skip


# the result


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "mine"
    keys = {"clients": 4, "participation": 0.5, "rounds": 3, "epochs": 1, "batch_size": 500, "eval_others_every": 2}
    return fedman.run(**keys, algorithm="feddc", zeta=0.15, out=out, device="cpu")


def test_repr_has_three_lines(result):
    first, second, third = repr(result).split("\n")
    assert first == "FedDC+MAN on digits, 4 clients (dir0.3), 3 rounds"
    assert second.startswith(f"test accuracy: all {result.accuracy:.2f} %, sel ")
    assert f"loss {result.summary['test_loss']['all']:.4g}" in second
    assert " s on cpu" in third
    assert third.endswith(f"written to {result.folder}")


def test_repr_names_the_figures_of_the_task():
    found = fedman.run(dataset=NUMBERS, task="regression", partition="iid", clients=2, **QUICK)
    second, third = repr(found).split("\n")[1:]
    assert second.startswith(f"test rmse: all {found.headline:.4g}, ")
    assert f"; mae {found.summary['mae']['all']:.4g}, loss " in second
    assert third.endswith("not written")
    one = fedman.run(partition=[range(60)], dataset=ARRAYS, **{**QUICK, "rounds": 1})
    assert ", 1 client (custom-" in repr(one)
    assert ", 1 round\n" in repr(one)


def test_a_finished_run_is_read_back(result):
    again = fedman.run(
        clients=4, participation=0.5, rounds=3, epochs=1, batch_size=500, eval_others_every=2, algorithm="feddc",
        zeta=0.15, out=result.folder, resume=True, device="cpu",
    )  # fmt: skip
    assert repr(again) == repr(result)


def test_frame(result, monkeypatch):
    frame = result.frame()
    assert next(iter(frame)) == "round"
    assert frame["round"].tolist() == [1, 2, 3]
    assert frame["loss"].tolist() == [r["loss"] for r in result.rounds]
    assert {"lr", "seconds", "penalty.relus.0", "penalty.output", "accuracy.all", "test_loss.cloud"} <= set(frame)
    assert not {"cohort", "quarantined"} & set(frame)
    assert np.isnan(frame["accuracy.sel"]).tolist() == [True, False, False]
    assert list(frame).index("accuracy.sel") == list(frame).index("accuracy.all") + 1
    pandas = types.ModuleType("pandas")
    pandas.DataFrame = lambda columns: ("a frame of", columns)
    pandas.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    kind, columns = result.frame()
    assert kind == "a frame of"
    assert columns.keys() == frame.keys()


def test_plot(result, tmp_path, monkeypatch):
    figure = result.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    left, right = figure.axes
    assert left.lines[0].get_ydata().tolist() == [r["loss"] for r in result.rounds]
    assert right.get_ylabel() == "test accuracy"
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in right.lines}
    assert set(curves) == {"all", "sel", "cloud"}
    assert curves["sel"] == ([2, 3], [r["accuracy"]["sel"] for r in result.rounds[1:]])
    for path in (tmp_path / "missing" / "curve.png", tmp_path / "curve.xyz"):
        with pytest.raises(fedman.UserError, match=rf"plot: {path} cannot be written \("):
            result.plot(path)
    monkeypatch.setattr("fedman.runs.result.find_spec", lambda name: None)
    with pytest.raises(fedman.UserError, match="plot: matplotlib is not installed; pip install matplotlib"):
        result.plot()


# names


def test_all_names_are_there_and_cost_nothing_before_they_are_used():
    code = (
        "import sys, fedman; assert fedman.__version__; from fedman import UserError, MAN, SGD, Task, Algorithm, data"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert not {{'torch', 'numpy'}} & set(sys.modules)"], check=True)
    assert len(set(fedman.__all__)) == len(fedman.__all__)
    assert set(fedman.__all__) <= set(dir(fedman))
    for name in fedman.__all__:
        assert getattr(fedman, name) is not None
        assert getattr(getattr(fedman, name), "__doc__", None), name
    for registry in PARTS.values():
        assert {part.__name__ for part in (*registry.built_in.values(), registry.base)} <= set(fedman.__all__)
    with pytest.raises(AttributeError, match="module 'fedman' has no attribute 'nothing'"):
        _ = fedman.nothing


def test_lists_of_names():
    assert fedman.list_algorithms() == list(ALGORITHMS)
    assert "man" in fedman.list_penalties()
    assert "regression" in fedman.list_tasks()
    assert fedman.list_optimizers() == ["sgd", "adam", "adamw"]
    assert "lstm" in fedman.list_models()
    assert "shakespeare" in fedman.list_datasets()
    assert "cifar100-iid" in fedman.list_presets()
    assert fedman.list_models.__doc__ == "The names of all models; `fedman list` says more."


def test_the_command_line_lists_all_parts(capsys):
    from tests.cli.command_line import main_ok

    main_ok(["list"])
    shown = capsys.readouterr().out
    for registry in PARTS.values():
        part = shown.split(f"{registry.group.removeprefix('fedman.')} (or module:Name, your own)\n")[1]
        assert [line.split()[0] for line in part.split("\n")[: len(registry)]] == list(registry)
    for words in ("momentum=0.0 nesterov=false", "man_logits=true", "  adam_beta1         β₁", "(Adam, AdamW)"):
        assert words in shown
