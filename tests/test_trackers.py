"""Trackers, with the packages that are installed; runs that a callback or a tracker stops."""

import time
import tomllib

import pytest

import fedman
from faults.runs import fingerprint
from fedman import StopRun, Tracker, trackers
from fedman.config import resolve
from fedman.errors import UserError
from fedman.runs import experiment
from fedman.runs.folder import RunFolder
from fedman.runs.key_text import parse_toml
from tests.federations import SMALL

RECORD = {
    "round": 4, "cohort": [1], "quarantined": [], "lr": 0.1, "loss": 0.5, "accuracy": {"all": 81.0}, "seconds": 0.1,
    "test_loss": {"all": 0.4}, "penalty": {"relu": 0.5}, "extended_from": 3,
    "clients": {"mean": 40.0, "worst_tenth": 10.0, "spread": 5.0, "each": [40.0]},
}  # fmt: skip
NUMBERS = {
    "lr": 0.1, "loss": 0.5, "accuracy/all": 81.0, "seconds": 0.1, "test_loss/all": 0.4, "penalty/relu": 0.5,
    "extended_from": 3, "clients/mean": 40.0, "clients/worst_tenth": 10.0, "clients/spread": 5.0,
}  # fmt: skip
KEYS = {**SMALL, "rounds": 5}


class Told(Tracker):
    """Notes what it is told; class attributes say when to fail."""

    seen: list
    stop_in = fail_in = 0
    fails_to_open = False

    def __init__(self, folder, settings, start):
        if self.fails_to_open:
            raise ConnectionError("no\nserver")
        super().__init__(folder, settings, start)
        self.seen.append((folder.name, settings["algorithm"], start))

    def log(self, record):
        self.seen.append(record["round"])
        if record["round"] == self.fail_in:
            raise OSError("gone")
        if record["round"] == self.stop_in:
            raise StopRun("enough")

    def close(self, ending):
        self.seen.append(None if ending is None else ending.get("stopped", "finished"))


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(Told, "seen", [], raising=False)
    return Told


OWN = f"{__name__}:Told"


def until(last):
    def stop(record):
        if record["round"] == last:
            raise StopRun("enough")

    return stop


def test_the_numbers_of_a_record():
    assert trackers.numbers(RECORD, "/") == NUMBERS


def test_a_tracker_is_told_every_round_and_the_end(tmp_path, told):
    fedman.run(**KEYS, log=OWN, out=tmp_path / "a")
    assert told.seen == [("a", "fedavg", 0), 1, 2, 3, 4, 5, "finished"]
    assert tomllib.loads((tmp_path / "a/config.toml").read_text())["log"] == OWN


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path, told, monkeypatch):
    monkeypatch.setattr(told, "fail_in", 2)
    with pytest.warns(
        UserWarning, match=r"^log: .*:Told failed in round 2 and is left out from now \(OSError: gone\)$"
    ):
        result = fedman.run(**KEYS, log=OWN, out=tmp_path / "a")
    assert told.seen == [("a", "fedavg", 0), 1, 2]
    assert len(result.rounds) == 5


def test_a_tracker_that_cannot_be_opened_ends_the_run_before_it_begins(tmp_path, told, monkeypatch):
    monkeypatch.setattr(told, "fails_to_open", True)
    with pytest.raises(UserError, match=r"^log: .*:Told cannot be opened \(ConnectionError: no server\)$"):
        fedman.run(**KEYS, log=OWN, out=tmp_path / "a")
    assert not (tmp_path / "a/config.toml").exists()


def test_trackers_are_closed_if_the_folder_refuses_the_run(tmp_path, told, monkeypatch):
    def refuse(*_):
        raise UserError("rounds.jsonl: damaged")

    monkeypatch.setattr(RunFolder, "start", refuse)
    with pytest.raises(UserError, match="damaged"):
        fedman.run(**KEYS, log=OWN, out=tmp_path / "a")
    assert told.seen == [("a", "fedavg", 0), None]


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("tensorbord", "log: no tracker named 'tensorbord'; did you mean tensorboard?"),
        ("tensorboard,wandb", "log: trackers are joined by +, as in tensorboard+mlflow, not 'tensorboard,wandb'"),
        ("json:loads", "log: json:loads is not a subclass of fedman.Tracker"),
        ("+", "log: no tracker named ''; there are tensorboard, mlflow, wandb"),
    ],
)
def test_no_such_tracker(log, message):
    with pytest.raises(UserError) as error:
        resolve({"log": log})
    assert str(error.value) == message


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_package_that_is_not_installed(name, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(UserError) as error:
        fedman.run(**KEYS, log=name, out=tmp_path / "a")
    assert str(error.value) == f"log: {name} is not installed; pip install {name}"
    assert not (tmp_path / "a").exists()


def test_a_log_needs_a_folder():
    with pytest.raises(UserError, match=r"^log: name the run's folder with out$"):
        fedman.run(**KEYS, log="tensorboard")


def test_the_key_of_earlier_versions():
    assert parse_toml(b"tensorboard = true\nseed = 1", "c.toml") == {"seed": 1, "log": "tensorboard"}
    assert parse_toml(b"tensorboard = false", "c.toml") == {}


def play_some_and_the_rest(kind, folder):
    """Log rounds 1 and 2, then, as a run that resumes after round 1, rounds 2 and 3."""
    for start, ending in ((0, None), (1, {"stopped": "enough"})):
        tracker = kind(folder, {"lr": 0.1, "algorithm": "feddc"}, start)
        for t in (start + 1, start + 2):
            tracker.log(RECORD | {"round": t, "loss": float(t)})
        tracker.close(ending)
        time.sleep(1.1 * (kind is trackers.WandB))  # whose folders have names by the second


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play_some_and_the_rest(trackers.TensorBoard, tmp_path)
    log = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(log.Tags()["scalars"]) == set(NUMBERS)
    assert [(e.step, e.value) for e in log.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.slow
def test_mlflow(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    play_some_and_the_rest(trackers.MLflow, tmp_path)
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("fedman").experiment_id])
    assert run.data.params == {"lr": "0.1", "algorithm": "feddc"}
    assert run.data.metrics == NUMBERS | {"loss": 3.0}
    assert run.data.tags["stopped"] == "enough"
    assert run.info.status == "FINISHED"
    assert sorted(m.step for m in client.get_metric_history(run.info.run_id, "loss")) == [1, 2, 2, 3]


@pytest.mark.slow
def test_a_server_of_mlflow_that_is_gone(tmp_path, monkeypatch):
    """MLflow itself would try for four minutes."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    started = time.monotonic()
    with pytest.raises(UserError, match=r"^log: mlflow cannot be opened \(MlflowException: API request to http://127"):
        fedman.run(**KEYS, log="mlflow", out=tmp_path / "a")
    assert time.monotonic() - started < 180


@pytest.mark.slow
def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.delenv("WANDB_MODE", raising=False)
    play_some_and_the_rest(trackers.WandB, tmp_path)
    logs = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert {log.stem for log in logs} == {f"run-{(tmp_path / 'wandb.id').read_text()}"}, "one run, in parts"
    steps = []
    for log in logs:
        rest = log.read_bytes()[7:]  # after the header: blocks of checksum, length, type, a protobuf message
        while rest:
            end = 7 + int.from_bytes(rest[4:6], "little")
            record, rest = Record.FromString(rest[7:end]), rest[end:]
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if values:
                steps.append((int(values["round"]), float(values["loss"]), float(values["accuracy/all"])))
    assert sorted(steps) == [(1, 1.0, 81.0), (2, 2.0, 81.0), (2, 2.0, 81.0), (3, 3.0, 81.0)]


def test_a_callback_stops_a_run_and_resume_goes_on(tmp_path):
    whole = fedman.run(**KEYS, algorithm="feddc", out=tmp_path / "whole")
    keys = {**KEYS, "algorithm": "feddc", "eval_every": 2, "eval_others_every": 4}
    result = fedman.run(**keys, progress=until(3), out=tmp_path / "a")
    assert (result.summary["stopped"], result.summary["round"], len(result.rounds)) == ("enough", 3, 3)
    assert result.summary["accuracy"]["all"] == whole.rounds[2]["accuracy"]["all"], "evaluated though not due"
    assert set(result.summary["accuracy"]) == {"all", "sel", "cloud"}
    assert "3 rounds of 5 (stopped: enough)" in repr(result)
    assert RunFolder(tmp_path / "a").check()
    again = fedman.run(**keys, resume=True, out=tmp_path / "a")
    assert "stopped" not in again.summary
    assert fingerprint(tmp_path / "a")["weights"] == fingerprint(tmp_path / "whole")["weights"]


def test_a_tracker_stops_a_run_which_a_sweep_counts_as_done(tmp_path, told, monkeypatch, capsys):
    from fedman.cli.commands import main

    monkeypatch.setattr(told, "stop_in", 2)
    words = [*(f"{key}={value}" for key, value in KEYS.items()), f"log={OWN}"]
    main_once(main, ["run", *words, "--out", str(tmp_path / "a")])
    assert "stopped after round 2 of 5: enough" in capsys.readouterr().out
    assert told.seen == [("a", "fedavg", 0), 1, 2, "enough"]
    for _ in range(2):
        main_once(main, ["sweep", *words, "--out", str(tmp_path / "s")])
    assert "1 of 1 runs are done already" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "--out", str(next((tmp_path / "s").glob("*/config.toml")).parent), "--resume"])
    assert "stopped after round 2, and its last checkpoint was not kept" in capsys.readouterr().err


def main_once(main, words):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert not end.value.code


def test_stopped_while_the_next_round_is_under_way(monkeypatch):
    """As on a GPU: the record of a round is written while the next one is computed, whose result is dropped."""

    def evaluate(self, outcome):
        self.pending = outcome, self._scores(last=self.state.round == self.config.rounds)

    plain = fedman.run(**{**KEYS, "rounds": 2})
    monkeypatch.setattr(experiment.Run, "evaluate", evaluate)
    result = fedman.run(**KEYS, progress=until(2))
    assert (result.summary["round"], len(result.rounds)) == (2, 2)
    assert all((result.models["cloud"][k] == v).all() for k, v in plain.models["cloud"].items())


def test_a_stop_in_the_last_round_is_none():
    assert "stopped" not in fedman.run(**KEYS, progress=until(5)).summary
