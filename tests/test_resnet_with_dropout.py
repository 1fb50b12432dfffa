"""A ResNet-18 with batch-norm and dropout from start to page, as a user plays it: a stacked sweep that is killed and
goes on, a client in quarantine, Flower, flatness, report."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedman.config import resolve
from fedman.models.resnet import ResNet18
from fedman.runs import experiment
from fedman.runs.folder import RunFolder
from fedman.runs.key_text import overrides

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]
FEDMAN = Path(sys.executable).parent / "fedman"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def deep(shape, outputs):
    """As narrow as two cores like it."""
    return ResNet18(shape, outputs, nn.BatchNorm2d, width=4, dropout=0.3)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Six clients, one of which has an image too bright for float32."""
    folder, rng = tmp_path_factory.mktemp("mine"), np.random.default_rng(0)
    x, y = rng.normal(size=(120, 3, 8, 8)).astype(np.float32), rng.integers(0, 3, 120)
    x[17] = 1e30
    np.savez(folder / "images.npz", x=x[:100], y=y[:100], x_test=x[100:], y_test=y[100:])
    sizes = [
        "clients=6",
        "participation=0.5",
        "cohort=fixed",
        "epochs=1",
        "batch_size=10",
        "rounds=8",
        "checkpoint_seconds=0",
    ]
    return [f"dataset=npz:{folder}/images.npz", f"model={__name__}:deep", *sizes]


def play(*words):
    done = subprocess.run([FEDMAN, *map(str, words)], capture_output=True, text=True, timeout=900, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


def models(folder):
    return RunFolder(folder).read_models()


def played(folder, rounds):
    """Whether both runs have come so far."""
    records = [path.read_text().splitlines() for path in folder.glob("*/rounds.jsonl")]
    return len(records) == 2 and all(len(lines) >= rounds for lines in records)


def same(found, wanted):
    return all(torch.equal(found[m][k], v) for m, model in wanted.items() for k, v in model.items())


@pytest.fixture(scope="module")
def swept(words, tmp_path_factory):
    out = tmp_path_factory.mktemp("swept")
    play("sweep", *words, "zeta=0,0.05", "--device", "cpu", "--out", out)
    return out


def test_a_killed_sweep_goes_on_to_the_same_bits(words, swept, tmp_path):
    command = [FEDMAN, "sweep", *words, "zeta=0,0.05", "--device", "cpu", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env=ENVIRONMENT
    )
    end = time.monotonic() + 600
    while not played(tmp_path, 2) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    play(*command[1:])
    runs = sorted(run.name for run in swept.iterdir() if run.is_dir())
    assert len(runs) == 2
    for run in runs:
        assert json.loads((swept / run / "summary.json").read_text())["stacked"] == 2
        assert same(models(tmp_path / run), models(swept / run))


def test_a_client_in_quarantine(swept):
    for records in swept.glob("*/rounds.jsonl"):
        rounds = [json.loads(line) for line in records.read_text().splitlines()]
        sick = {k for r in rounds for k in r["quarantined"]}
        assert len(sick) == 1
        assert all(sick <= {*r["quarantined"]} for r in rounds if sick <= {*r["cohort"]})


def test_on_flower_the_simulators_bits(words, tmp_path):
    chosen = [*(word for word in words if "rounds" not in word), "zeta=0.05", "chunk=1", "rounds=3"]
    play("flower", "simulate", *chosen, "--device", "cpu", "--out", tmp_path / "out")
    here = experiment.run(resolve(overrides(chosen)), device="cpu")
    assert same(models(tmp_path / "out"), here.models)


def test_flatness_and_report(swept):
    runs = [run for run in swept.iterdir() if run.is_dir()]
    play("flatness", *runs, "--top", "1", "--tol", "0.5")
    play("report", swept, "--out", swept / "page.html")
    assert "FedAvg+MAN" in (swept / "page.html").read_text()
