"""Whole runs on the embedded data: records, resume after a kill at any moment, the Python call."""

import json
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedman
import fedman.data
from faults.runs import fingerprint
from fedman.algorithms import ALGORITHMS
from fedman.backends.in_process import InProcess
from fedman.cli import main
from fedman.config import resolve
from fedman.errors import Diverged, UserError
from fedman.execution.base import Batch
from fedman.execution.device import pick_precision
from fedman.execution.vmapped import Vmapped
from fedman.models import build
from fedman.models.mlp import MLP
from fedman.models.parameters import flatten
from fedman.penalties import MAN
from fedman.runs.build import build as build_runs
from fedman.runs.folder import RunFolder
from fedman.runs.records import Headline
from fedman.runs.run_under_way import rounds_to_target
from fedman.tasks import Classification
from tests.federations import SMALL
from tests.runs.killed import run_killed

FEDMAN = [sys.executable, "-c", "from fedman.cli.commands import main; main()"]

SIGNALLED = """
import os
from fedman.cli.commands import main
from fedman.runs.folder import RunFolder

append = RunFolder.append

def append_and_signal(folder, record):
    append(folder, record)
    if record["round"] == 4:
        os.kill(os.getpid(), {how})

RunFolder.append = append_and_signal
main()
"""
"""The command, to which a signal comes after its fourth record: one from outside could come when the run has ended."""


def same_run(a, b):
    """Two run folders hold the same result, bit for bit."""
    assert fingerprint(a) == fingerprint(b)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("has", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_fastest_precision_that_costs_no_accuracy(device, has, large, monkeypatch):
    """A GPU always gains from bf16, a CPU by large models."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has and not including_emulation)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    fast = has and (large or device == "cuda")
    assert pick_precision("auto", device, large) == ("bf16" if fast else "fp32")
    assert pick_precision("fp64", device, large) == "fp64"


def test_a_large_model_on_a_cpu_runs_in_bf16_where_that_is_fast(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    small = {**SMALL, "rounds": 1}
    assert fedman.run(**small).summary["precision"] == "fp32"
    small["model"] = MLP((1, 8, 8), 10, hidden=(512, 64))
    assert fedman.run(**small).summary["precision"] == "bf16"
    assert fedman.run(precision="fp32", **small).summary["precision"] == "fp32"


@pytest.mark.parametrize("chunk", [1, 100], ids=["threads", "stacked"])
def test_bf16_on_a_cpu(chunk):
    """Half the bits in the products: near fp32 and not the same, in every worker thread too."""
    keys = {"model": "small_cnn", "clients": 4, "participation": 1.0, "rounds": 2, "epochs": 1, "zeta": 0.15}
    full, half = (fedman.run(**keys, chunk=chunk, precision=precision) for precision in ("fp32", "bf16"))
    assert half.summary["precision"] == "bf16"
    for name, weights in full.models["all"].items():
        distance = (half.models["all"][name] - weights).norm() / weights.norm()
        assert 1e-5 < distance < 0.02, name


def test_every_seed_draws_its_own():
    """`seed` the weights and batches, `partition_seed` who has what, `schedule_seed` the cohorts."""

    def drawn(**seed):
        config = resolve({**SMALL, "rounds": 2, "unbalanced": 0.5, **seed})
        (federation,) = build_runs([config], fedman.data.load("digits"), "cpu").federations
        cohorts = [record["cohort"] for record in fedman.run(**{**SMALL, "rounds": 2, **seed}).rounds]
        return federation.initial.tolist(), [part.tolist() for part in federation.samples.parts], cohorts

    whole = drawn()
    for seed, changes in (("seed", 0), ("partition_seed", 1), ("schedule_seed", 2)):
        other = drawn(**{seed: 5})
        assert [a != b for a, b in zip(whole, other, strict=True)] == [i == changes for i in range(3)], seed


@pytest.mark.parametrize(
    ("found", "first"),
    [
        ([{}, {"cloud": 70.0, "sel": 90.0}, {"cloud": 85.0, "sel": 85.0}], 3),
        ([{"all": 70.0, "cloud": 90.0}, {"all": 81.0, "cloud": 70.0}], 2),
        ([{"all": 70.0}, {"cloud": 90.0}], None),
    ],
)
def test_the_target_is_that_of_the_headline(found, first):
    """Of the server's model where the mean of all clients' last ones is not kept, as on Flower with a robust rule."""
    records = [{"round": t, **({"accuracy": values} if values else {})} for t, values in enumerate(found, 1)]
    assert rounds_to_target(records, 80.0, Headline()) == first


def test_what_a_run_writes(tmp_path):
    result = fedman.run(**SMALL, algorithm="feddc", zeta=0.15, target=30.0, eval_others_every=2, out=tmp_path)
    assert tomllib.loads((tmp_path / "config.toml").read_text()) == result.summary["config"]
    assert resolve(result.summary["config"]) == resolve(
        {**SMALL, "algorithm": "feddc", "zeta": 0.15, "target": 30.0, "eval_others_every": 2}
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == result.summary
    assert {
        "config",
        "accuracy",
        "rounds_to_target",
        "seconds",
        "device",
        "precision",
        "version",
    } <= summary.keys()
    assert set(summary["accuracy"]) == {"all", "sel", "cloud"}
    records = RunFolder(tmp_path).read_rounds()
    assert records == result.rounds
    assert [r["round"] for r in records] == [1, 2, 3, 4, 5]
    assert [set(r["accuracy"]) == {"all"} for r in records] == [True, False, True, False, False]
    assert [r["lr"] for r in records] == [0.1 * 0.998**t for t in range(5)]
    first = next((r["round"] for r in records if r["accuracy"]["all"] >= 30), None)
    assert summary["rounds_to_target"] == first
    assert list(records[0]["penalty"]) == ["relus.0", "relus.1", "output"]
    models = load_file(tmp_path / "model.safetensors")
    module = build("mlp", (1, 8, 8), 10)
    for name in ("all", "sel", "cloud"):
        module.load_state_dict(result.models[name])
        assert all(torch.equal(models[f"{name}.{k}"], v) for k, v in result.models[name].items())
    data = fedman.data.load("digits")
    x = (torch.tensor(data.x_test) / 255 - data.mean[0]) / data.std[0]
    hits = (module(x.permute(0, 3, 1, 2)).argmax(-1) == torch.tensor(data.y_test)).float().mean().item()
    assert 100 * hits == pytest.approx(summary["accuracy"]["cloud"], abs=1e-3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_resume_from_any_checkpoint_gives_the_same_bits(tmp_path, algorithm):
    """Stop after each round in turn (as a kill would: records may be ahead of the checkpoint), then go on."""
    few = {"rounds": 4, "batch_size": 120}
    keys = {**SMALL, **few, "algorithm": algorithm, "zeta": 0.15, "checkpoint_seconds": 0.0}
    fedman.run(**keys, out=tmp_path / "whole")
    for stop in (1, 3):
        out = tmp_path / f"stopped{stop}"
        run_killed(stop, **keys, out=out)
        with open(out / "rounds.jsonl", "a") as file:
            file.write('{"round": 99, "half a li')
        seen = []
        fedman.run(**keys, out=out, resume=True, progress=lambda r, seen=seen: seen.append(r["round"]))
        assert seen == list(range(stop + 1, 5))
        same_run(tmp_path / "whole", out)


def wait_for_rounds(process, out, rounds):
    while len(RunFolder(out).read_rounds()) < rounds:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


RUN = ["run", "--preset", "digits", "--device", "cpu", "model=mlp", "rounds=16", "algorithm=fedspeed"]
RUN += ["epochs=1", "checkpoint_seconds=0.1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*RUN, "--out", str(out)])
    return out


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_with_its_own_command(tmp_path):
    """Its run alone, as `fedman run --resume` would have it, is not the sweep."""
    words = [*FEDMAN, "sweep", "--preset", "digits", "model=mlp", "rounds=300", "seed=0,1", "--device", "cpu"]
    process = subprocess.Popen([*words, "--workers", "1", "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    wait_for_rounds(process, tmp_path / "seed0", 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    where = f"{tmp_path / 'seed0'} {tmp_path / 'seed1'}"
    assert err.endswith(f" is saved in {where}; go on with the same command\n")


@pytest.mark.xdist_group("kill")
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP))]
)
def test_a_killed_process_goes_on_to_the_same_result(tmp_path, whole, how):
    out = tmp_path / "killed"
    words = [sys.executable, "-c", SIGNALLED.format(how=int(how)), *RUN, "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True)
    if how == signal.SIGKILL:
        assert done.returncode == -how, done.stderr
    else:
        assert done.returncode == 128 + how, done.stderr
        assert f"go on with: fedman run --out {out} --resume" in done.stderr
        assert not (out / "summary.json").exists()
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["run", "--out", str(out), "--resume"])
    same_run(whole, out)


def test_two_runs_in_one_folder_are_refused(tmp_path):
    def other(record):
        with pytest.raises(UserError, match="another run is writing to this folder"):
            fedman.run(**SMALL, out=tmp_path, resume=True)

    fedman.run(**{**SMALL, "rounds": 1}, out=tmp_path, progress=other)


def test_a_finished_run_is_returned_as_it_is(tmp_path):
    first = fedman.run(**SMALL, checkpoint_seconds=0.0, out=tmp_path)
    assert [p.name for p in (tmp_path / "checkpoint").glob("*.json")] == ["round-000005.json"]
    again = fedman.run(**SMALL, out=tmp_path, resume=True, progress=lambda r: pytest.fail("played again"))
    assert (again.summary, again.rounds) == (first.summary, first.rounds)
    assert all(torch.equal(again.models[m][k], v) for m, model in first.models.items() for k, v in model.items())


def accuracy_of_all(rounds):
    return [(r["round"], r["cohort"], r["loss"], r["accuracy"]["all"]) for r in rounds]


@pytest.mark.parametrize("algorithm", ["fedavg", "feddc", "scaffold"])
def test_more_rounds_for_a_finished_run(tmp_path, algorithm):
    """It ends with the weights of a run of so many rounds, and its records and summary say when it was extended."""
    keys = {**SMALL, "algorithm": algorithm, "zeta": 0.15}
    whole = fedman.run(**{**keys, "rounds": 8})
    fedman.run(**{**keys, "rounds": 3}, out=tmp_path)
    fedman.run(**{**keys, "rounds": 5}, out=tmp_path, resume=True)
    more = fedman.run(**{**keys, "rounds": 8}, out=tmp_path, resume=True)
    assert all(torch.equal(more.models[m][k], v) for m, model in whole.models.items() for k, v in model.items())
    assert accuracy_of_all(more.rounds) == accuracy_of_all(whole.rounds)
    assert {r["round"]: r["extended_from"] for r in more.rounds if "extended_from" in r} == {4: 3, 6: 5}
    assert more.summary["extended"] == [3, 5]
    assert more.summary["config"]["rounds"] == 8
    assert fedman.run(**{**keys, "rounds": 8}, out=tmp_path, resume=True).summary == more.summary
    assert "extended" not in whole.summary
    with pytest.raises(UserError, match="holds a run of another configuration; rounds differ"):
        fedman.run(**{**keys, "rounds": 7}, out=tmp_path, resume=True)
    with pytest.raises(UserError, match="holds a run of another configuration; lr, rounds differ"):
        fedman.run(**{**keys, "rounds": 9}, lr=0.05, out=tmp_path, resume=True)


def same(one, other):
    return all(torch.equal(v, other.models[m][k]) for m, model in one.models.items() for k, v in model.items())


def switch_grad_off():
    torch.set_grad_enabled(False)


def switch_to_float64():
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("switch", [switch_grad_off, switch_to_float64])
def test_a_run_does_not_depend_on_what_a_notebook_has_switched(switch):
    keys = {**SMALL, "rounds": 2, "algorithm": "feddyn"}
    before = fedman.run(**keys)
    try:
        switch()
        assert same(fedman.run(**keys), before)
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        assert same(fedman.run(**keys), before)


def slow(shape, outputs):
    """A model whose two layers are drawn one some time after the other."""
    first = nn.Linear(int(np.prod(shape)), 8)
    time.sleep(0.1)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(8, outputs))


def test_runs_in_several_threads_are_those_of_one(tmp_path):
    runs = [{**SMALL, "rounds": 1, "model": "tests.runs.test_experiment:slow", "seed": seed} for seed in range(3)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda keys: fedman.run(**keys), runs))
    assert all(same(fedman.run(**keys), result) for keys, result in zip(runs, found, strict=True))


def test_a_callback_may_change_the_record_it_is_given():
    def clear(record):
        record["accuracy"].clear()
        record.clear()

    result = fedman.run(**{**SMALL, "rounds": 2}, progress=clear)
    assert [record["round"] for record in result.rounds] == [1, 2]
    assert result.headline == result.rounds[-1]["accuracy"]["all"]


def test_no_more_rounds_for_a_cosine_which_ends_with_the_last(tmp_path):
    """Neither for a finished run nor for one that was interrupted: the rates so far are not those of a longer run."""
    keys = {**SMALL, "lr_schedule": "cosine", "checkpoint_seconds": 0}

    def die(record):
        raise KeyboardInterrupt

    fedman.run(**{**keys, "rounds": 2}, out=tmp_path / "finished")
    with pytest.raises(KeyboardInterrupt):
        fedman.run(**{**keys, "rounds": 2}, out=tmp_path / "interrupted", progress=die)
    for out in (tmp_path / "finished", tmp_path / "interrupted"):
        with pytest.raises(UserError, match="rounds: cannot be raised from 2 to 3 with lr_schedule=cosine"):
            fedman.run(**{**keys, "rounds": 3}, out=out, resume=True)
        fedman.run(**{**keys, "rounds": 2}, out=out, resume=True)


@pytest.mark.parametrize("stop", [4, 6])
def test_an_extension_that_is_killed_goes_on(tmp_path, stop):
    """Right after its first record, which no checkpoint has yet; and two rounds later."""
    keys = {**SMALL, "checkpoint_seconds": 1e6, "algorithm": "feddc"}
    fedman.run(**{**keys, "rounds": 3}, out=tmp_path)

    def die(record):
        if record["round"] == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedman.run(**{**keys, "rounds": 8}, out=tmp_path, resume=True, progress=die)
    assert not (tmp_path / "summary.json").exists()
    more = fedman.run(**{**keys, "rounds": 8}, out=tmp_path, resume=True)
    assert more.summary["extended"] == [3]
    assert accuracy_of_all(more.rounds) == accuracy_of_all(fedman.run(**{**keys, "rounds": 8}).rounds)


def test_a_finished_run_without_its_state_has_no_more_rounds(tmp_path):
    fedman.run(**SMALL, keep_state=False, out=tmp_path)
    message = (
        r"finished after 5 rounds, and its last checkpoint was not kept \(keep_state\); choose another --out for 9"
    )
    with pytest.raises(UserError, match=message):
        fedman.run(**{**SMALL, "rounds": 9}, out=tmp_path, resume=True)
    assert fedman.run(**SMALL, out=tmp_path, resume=True).summary["config"]["rounds"] == 5


def test_a_diverged_run_says_so(tmp_path):
    with pytest.raises(Diverged, match="round 1"):
        fedman.run(**SMALL, lr=1e30, clip=float("inf"), out=tmp_path)
    assert json.loads((tmp_path / "diverged.json").read_text())["round"] == 1
    assert not (tmp_path / "summary.json").exists()
    with pytest.raises(Diverged, match="round 1"):
        fedman.run(**SMALL, lr=1e30, clip=float("inf"), out=tmp_path, resume=True)


def test_a_users_own_module_and_arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2, 6)).astype(np.float32)
    y = (x.sum((1, 2)) > 0).astype(int)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(12, 16)
            self.out = nn.Linear(16, 2)

        def forward(self, x):
            return self.out(nn.functional.gelu(self.inner(x.flatten(1))))

    result = fedman.run(
        dataset=(x[:200], y[:200], x[200:], y[200:]), model=Own(), clients=4, participation=1.0, partition="iid",
        rounds=8, batch_size=10, algorithm="feddyn", zeta=0.01,
    )  # fmt: skip
    assert result.accuracy > 85
    assert (result.summary["config"]["model"], result.summary["config"]["dataset"]) == ("custom", "custom")
    assert list(result.rounds[0]["penalty"]) == ["gelu", "output"] or list(result.rounds[0]["penalty"]) == [
        "gelu#1",
        "output",
    ]
    Own().load_state_dict(result.models["cloud"])


@pytest.mark.parametrize("queues", [False, True])
def test_a_record_waits_only_for_a_backend_that_queues(queues, monkeypatch):
    """Which is this process with a GPU."""
    seen, train = [], InProcess.train
    monkeypatch.setattr(InProcess, "queues", queues)
    monkeypatch.setattr(InProcess, "train", lambda *now: (seen.append("train"), train(*now))[1])
    fedman.run(**{**SMALL, "rounds": 3}, progress=lambda record: seen.append(record["round"]))
    late = ["train", "train", 1, "train", 2, 3]
    assert seen == (late if queues else ["train", 1, "train", 2, "train", 3])


def test_man_lowers_the_activations_it_counts():
    plain, man = (fedman.run(**{**SMALL, "rounds": 15}, zeta=zeta).rounds[-1]["penalty"] for zeta in (0.0, 0.5))
    assert sum(man.values()) < 0.7 * sum(plain.values())


def test_tiny_code_variant_is_the_authors_term():
    """R = mean a1² + mean a2² + mean a4² + mean a5² + mean_j Var_batch(a5[j]), no conv 3, no logits."""
    torch.manual_seed(0)
    model = build("tiny_cnn", (3, 64, 64), 5)
    stacked = Vmapped(model, Classification(), MAN(man_variant="tiny-code", man_logits=False))
    x, y = torch.randn(1, 6, 3, 64, 64), torch.zeros(1, 6, dtype=torch.long)
    maps = []
    for relu in model.relus:
        relu.register_forward_hook(lambda module, inputs, out: maps.append(out.detach()))
    model(x[0])
    a1, a2, _, a4, a5 = maps
    want = sum(a.square().mean() for a in (a1, a2, a4, a5)) + a5.var(0).mean()
    terms = stacked.penalty_terms(flatten(model)[None], Batch(x, y))
    torch.testing.assert_close(sum(terms.values())[0], want)
    padded = torch.cat([x, torch.randn(1, 2, 3, 64, 64)], 1), torch.zeros(1, 8, dtype=torch.long)
    weight = torch.tensor([[1 / 6] * 6 + [0.0] * 2])  # as where a client has fewer samples than others of its chunk
    terms = stacked.penalty_terms(flatten(model)[None], Batch(*padded, weight))
    torch.testing.assert_close(sum(terms.values())[0], want)
