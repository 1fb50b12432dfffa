"""A real federation on loopback: SuperLink, four SuperNodes, `flwr run`; runs have the simulator's bits."""

import json
import time

import pytest
import torch

from fedman.algorithms import ALGORITHMS
from fedman.config import resolve
from fedman.flower.app import new_project
from fedman.flower.exchange import exchange
from fedman.runs import experiment
from fedman.runs.folder import RunFolder
from fedman.runs.key_text import overrides
from tests.flower.deployment import Deployment

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]
SETTINGS = "dataset=digits clients=4 participation=0.6 unbalanced=0.5 rounds=3 epochs=1 zeta=0.1 chunk=1"
TIME_LIMIT = 500
NAMES = list({exchange(kind()): name for name, kind in reversed(list(ALGORITHMS.items()))}.values())
"""An algorithm for every set of vectors that travel; `tests/backends` has all of them, in one process."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """All runs at once on one federation; the folder with a run for each algorithm."""
    root = tmp_path_factory.mktemp("federation")
    new_project(root / "app")
    with Deployment(root / "net", env={"FEDMAN_MEMORY": str(root / "memory")}, warm=True) as net:
        net.start_nodes({f"node{k}": f"partition-id={k}" for k in range(4)})
        for name in NAMES:
            net.submit(root / "app", f'settings="{SETTINGS} algorithm={name} wait=300" out="{root / name}"')
        end = time.monotonic() + TIME_LIMIT
        waiting = set(NAMES)
        while waiting and time.monotonic() < end:
            waiting -= {n for n in waiting if any((root / n / f).exists() for f in ("summary.json", "failed.json"))}
            time.sleep(0.5)
        assert not waiting, f"{waiting} not done after {TIME_LIMIT} s{net.logs()}"
    return root


def test_every_kind_of_algorithm_has_the_bits_of_the_simulator(finished):
    """One test, so that the federation is started once however tests are spread over processes."""
    for algorithm in NAMES:
        folder = finished / algorithm
        assert not (folder / "failed.json").exists(), (folder / "failed.json").read_text()
        config = resolve({**overrides(SETTINGS.split()), "algorithm": algorithm})
        here = experiment.run(config, device="cpu")
        there = RunFolder(folder).read_models()
        assert all(torch.equal(there[m][k], v) for m, model in here.models.items() for k, v in model.items()), algorithm
        records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        assert [r["cohort"] for r in records] == [r["cohort"] for r in here.rounds]
        assert [r["accuracy"] for r in records] == [r["accuracy"] for r in here.rounds]
