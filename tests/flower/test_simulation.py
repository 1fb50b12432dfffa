"""`fedman flower simulate` as a user starts it: Flower on Ray, the simulator's records and bits, exit codes."""

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

from fedman.cli.commands import main
from fedman.config import resolve
from fedman.runs import experiment
from fedman.runs.folder import RunFolder
from fedman.runs.key_text import overrides

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]
FEDMAN = Path(sys.executable).parent / "fedman"
WORDS = ["dataset=digits", "clients=6", "participation=0.5", "epochs=1", "zeta=0.1", "chunk=1"]


def start(*words, out, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [FEDMAN, "flower", "simulate", *words, "--out", out, "--device", "cpu"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def simulate(*words, out):
    process = start(*words, out=out)
    stdout, stderr = process.communicate(timeout=600)
    return process.returncode, stdout, stderr


def same(folder, result):
    there = RunFolder(folder).read_models()
    return all(torch.equal(there[m][k], v) for m, model in result.models.items() for k, v in model.items())


def test_an_interrupted_and_resumed_run_has_the_simulators_bits(tmp_path):
    """On data of one's own; SIGINT after the first round, then --resume."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 6)).astype(np.float32), rng.integers(0, 3, 200)
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    words = [*WORDS[1:], f"dataset=npz:{tmp_path}/mine.npz", "algorithm=feddc", "rounds=12"]
    out = tmp_path / "out"
    process = start(*words, out=out, start_new_session=True)
    end = time.monotonic() + 600
    while not (out / "checkpoint").exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C on a terminal does
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 130, stderr
    assert f"go on with: fedman flower simulate --out {out} --resume" in stderr
    assert "Traceback" not in stderr
    assert (out / "memory").is_dir()
    code, stdout, stderr = simulate("--resume", out=out)
    assert code == 0, stderr
    assert "FedDC+MAN: all " in stdout
    here = experiment.run(resolve(overrides(words)), device="cpu")
    assert same(out, here)
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [r["accuracy"] for r in records] == [r["accuracy"] for r in here.rounds]
    assert not (out / "memory").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["round_timeout=0"], "error: round_timeout: should be greater than 0, not '0'"),
        (["quorum=2"], "error: quorum: should be less than or equal to 1, not '2'"),
        (["sizes=1,2,3"], "error: sizes: simulated clients have no data and no keys of their own; leave it out"),
        (["roster=keys"], "error: roster: simulated clients have no data and no keys of their own; leave it out"),
        (["nonsense=1"], "error: nonsense: no such key"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["flower", "simulate", *WORDS, *words, "--out", str(tmp_path / "out")])
    stderr = capsys.readouterr().err
    assert end.value.code == 2
    assert stderr.startswith(f"fedman: {message}")
    assert len(stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_too_few_good_replies_are_exit_code_4(tmp_path):
    code, _, stderr = simulate(*WORDS, "norm_bound=1e-9", "retries=1", out=tmp_path / "out")
    assert code == 4, stderr
    assert "too few clients: round 1: 0 good replies from a cohort of" in stderr
    assert "Traceback" not in stderr


def test_more_than_ray_has_is_refused(tmp_path):
    code, _, stderr = simulate(*WORDS, "--cpus", "1000", out=tmp_path / "out")
    assert code == 2
    assert stderr.startswith("fedman: error: cpus, gpus: a client would take 1000 and 0, Ray has")
