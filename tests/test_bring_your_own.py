"""An algorithm, a task and a penalty that are defined in this file alone go wherever fedman's own go."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import fedman
from fedman.config import resolve
from fedman.runs.folder import RunFolder
from tests.cli.command_line import main_ok
from tests.federations import Loop
from tests.runs.test_experiment import SIGNALLED

HERE = "tests.test_bring_your_own"


@dataclass(frozen=True)
class Mine(fedman.Algorithm):
    """v ← βv + ∇F(w) + h within a round; w ← descend(w, v). A client remembers h ← h + γ(w − θ) and uploads it, the
    server keeps m ← m/2 + mean(x_k) − θ and the mean of h, and sends θ + m."""

    title = "Mine"
    server = ("w", "m", "h")
    client = ("h",)
    weighted = True

    beta: float = fedman.hyperparameter(0.5, "β, momentum", maximum=1.0)
    gamma: float = fedman.hyperparameter(0.01, "γ, how fast clients learn their drift")

    @property
    def scratch(self):
        return ("v",)

    def step(self, w, grad, server, client, hp):
        v = self.beta * client["v"] + grad(w) + client["h"] - server["h"]
        return fedman.descend(w, v, hp), {"v": v}

    def finish(self, w, server, client, hp):
        h = client["h"] + self.gamma * (w - server["w"])
        return {"h": h}, {"w": w, "h": h}

    def update(self, server, mean, fraction):
        m = 0.5 * server["m"] + mean["w"] - server["w"]
        return {"w": server["w"] + m, "m": m, "h": mean["h"]}


@dataclass(frozen=True)
class Brier(fedman.Task):
    """Σ_c (softmax(o)_c − [c = y])², of which less is better."""

    title = "Brier"
    headline = "brier"
    higher_is_better = False

    power: float = fedman.hyperparameter(2.0, "exponent", minimum=1.0)

    def loss(self, output, target):
        wanted = torch.nn.functional.one_hot(target, output.shape[-1])
        return (output.softmax(-1) - wanted).abs().pow(self.power).sum(-1)

    def scores(self, output, target):
        return {"brier": self.loss(output, target), "right": 100.0 * (output.argmax(-1) == target)}


@dataclass(frozen=True)
class Largest(fedman.Penalty):
    """The largest absolute logit of a sample, the mean over the batch."""

    title = "Largest"

    share: float = fedman.hyperparameter(1.0, "factor on the term")

    def attach(self, model):
        return Logits(model, self.share)


class Logits:
    def __init__(self, model, share):
        self.share = share
        model.register_forward_hook(self.keep)

    def keep(self, model, inputs, output):
        self.output = output

    def terms(self, weight=None):
        each = self.share * self.output.abs().amax(-1)
        return {"largest": each.mean() if weight is None else (weight * each).sum()}


NAMES = {"algorithm": f"{HERE}:Mine", "task": f"{HERE}:Brier", "penalty": f"{HERE}:Largest"}
KEYS = {
    "clients": 6, "participation": 0.5, "rounds": 3, "epochs": 1, "batch_size": 40, "lr": 0.05, "eval_others_every": 1,
}  # fmt: skip
OBJECTS = {"algorithm": Mine(beta=0.7), "task": Brier(), "penalty": Largest(0.1, share=0.5)}
GIVEN = {**NAMES, "beta": 0.7, "zeta": 0.1, "share": 0.5}
WORDS = [f"{key}={value}" for key, value in {**KEYS, **GIVEN}.items()]


def bits(result):
    return {f"{model}.{name}": w for model, named in result.models.items() for name, w in named.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(w, other[name]) for name, w in one.items())


@pytest.fixture(scope="module")
def result():
    return fedman.run(**KEYS, **OBJECTS, device="cpu")


def test_by_name_or_as_an_object(result):
    by_name = fedman.run(**KEYS, **GIVEN, device="cpu")
    assert by_name.summary["config"] == result.summary["config"]
    assert same(bits(by_name), bits(result))
    assert result.summary["method"] == "Mine+Largest"
    assert {"brier", "right", "test_loss"} <= set(result.summary)
    assert (result.summary["headline"], result.summary["lower_is_better"]) == ("brier", True)
    assert set(result.rounds[0]["penalty"]) == {"largest"}
    assert result.rounds[-1]["brier"]["cloud"] < result.rounds[0]["brier"]["cloud"]


def test_one_client_at_a_time_or_stacked():
    alone, stacked = (
        bits(fedman.run(**KEYS, **OBJECTS, chunk=chunk, precision="fp64", device="cpu")) for chunk in (1, 6)
    )
    for name, w in stacked.items():
        torch.testing.assert_close(w, alone[name], rtol=1e-9, atol=1e-11)


def test_runs_that_share_a_chunk(tmp_path, monkeypatch):
    """As on a GPU, with graphs that only take the steps: a number that differs between runs is one a client."""
    from fedman.execution.executor import Executor
    from fedman.runs import build

    graphs = Loop()
    monkeypatch.setattr(build, "Executor", lambda *given: Executor(*given, graphs))
    words = [word for word in WORDS if not word.startswith("beta=")]
    main_ok(["sweep", *words, "beta=0.2,0.7", "precision=fp64", "--out", str(tmp_path), "--device", "cpu"])
    assert max(graphs.sizes) > 6
    monkeypatch.undo()
    for beta in (0.2, 0.7):
        keys = {**KEYS, **GIVEN, "beta": beta, "precision": "fp64", "device": "cpu"}
        alone, stacked = fedman.run(**keys), RunFolder(tmp_path / f"beta{beta}").read_models()
        for name, w in alone.models["all"].items():
            torch.testing.assert_close(stacked["all"][name], w, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_killed_and_resumed(tmp_path):
    """kill -9 in the middle of a run; `--resume` finds the parts by their names."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(fedman.__file__).parents[1]), *sys.path])}
    keys = {**KEYS, **GIVEN, "rounds": 20, "checkpoint_seconds": 0.0}
    words = ["run", "--out", str(tmp_path / "killed"), "--device", "cpu", *(f"{k}={v}" for k, v in keys.items())]
    killed = [sys.executable, "-c", SIGNALLED.format(how=int(signal.SIGKILL)), *words]
    done = subprocess.run(killed, capture_output=True, text=True, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = RunFolder(tmp_path / "killed")
    assert not folder.summary.exists()
    played = []
    again = fedman.run(**keys, out=folder.path, resume=True, device="cpu", progress=lambda r: played.append(r["round"]))
    assert played[0] > 1
    whole = fedman.run(**keys, device="cpu")
    assert same(bits(again), bits(whole))
    assert [r["loss"] for r in again.rounds] == [r["loss"] for r in whole.rounds]


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """A sweep over own and built-in parts, with and without the penalty; its folder, and what was printed."""
    folder = tmp_path_factory.mktemp("sweep")
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    np.savez(folder / "points.npz", x=(rng.normal(size=(90, 4)) + 2 * np.eye(3, 4)[y]).astype(np.float32), y=y)
    words = [word for word in WORDS if not word.startswith(("algorithm=", "zeta="))]
    words += [f"algorithm={HERE}:Mine,fedavg", "zeta=0,0.1", f"dataset=npz:{folder / 'points.npz'}", "partition=iid"]
    main_ok(["sweep", *words, "--out", str(folder / "grid"), "--device", "cpu"])
    return folder / "grid"


def test_sweep(grid):
    assert len(list(grid.glob("*/summary.json"))) == 4
    table = (grid / "table.md").read_text(encoding="utf-8")
    assert "| Mine | " in table
    assert "+Largest ζ=0.1" in table


def test_results(grid, tmp_path):
    main_ok(["results", str(grid), "--out", str(tmp_path / "results.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {row["method"] for row in rows} == {"FedAvg", "FedAvg+Largest", "Mine", "Mine+Largest"}
    assert all(row["headline"] == "brier" for row in rows)


def test_flatness(grid, capsys):
    own = sorted(path.parent for path in grid.glob("*Mine*/summary.json"))
    main_ok(["flatness", *map(str, own), "--top", "2", "--model", "cloud"])
    shown = capsys.readouterr().out
    assert "Mine+Largest" in shown
    assert json.loads((own[0] / "flatness.json").read_text())


def test_report(grid, tmp_path):
    main_ok(["report", str(grid), "--out", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for word in ("Mine", "Largest", "brier"):
        assert word in page


def test_on_flower(result, tmp_path):
    pytest.importorskip("flwr")
    from fedman.flower.server import serve
    from fedman.flower.server_options import ServerOptions
    from tests.flower.local_grid import LocalGrid

    config = resolve({**KEYS, **GIVEN, "chunk": 1})
    options = ServerOptions(wait=0.2, round_timeout=30.0, retries=0, norm_bound=100.0)
    grid = LocalGrid.of(KEYS["clients"], tmp_path / "memory", allow=",".join(NAMES.values()))
    there = serve(grid, config, options, out=tmp_path / "out", device="cpu")
    here = fedman.run(**KEYS, **OBJECTS, chunk=1, device="cpu")
    assert same(bits(there), bits(here))
    assert [r["brier"] for r in there.rounds] == [r["brier"] for r in here.rounds]
    assert [r["penalty"] for r in there.rounds] == [r["penalty"] for r in here.rounds]
