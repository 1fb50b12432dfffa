"""Trackers: logs of a run beside its own files, for TensorBoard, MLflow, Weights & Biases or a service of your own.

A run names them in its key `log`, joined by +: `log=tensorboard+mlflow`, `log=my_module:MyTracker`. Nothing here
imports torch or a tracker's package before a run opens it.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from fedman.errors import UserError, describe, nearest
from fedman.parts import find

Numbers = dict[str, int | float]


class Tracker(ABC):
    """Receives the record of every round of a run. `log` may raise `fedman.StopRun` to end the run after that round.

    `__init__` opens the log: `folder` is the run's, `settings` its keys, `start` the number of rounds that a
    resumed run has behind it. Rounds since its last checkpoint are logged again.
    """

    package: ClassVar[str] = ""  # to be installed; "": none

    def __init__(self, folder: Path, settings: Mapping[str, Any], start: int) -> None:
        self.folder, self.settings, self.start = folder, settings, start

    @abstractmethod
    def log(self, record: Mapping[str, Any]) -> None:
        """A round, as its line in `rounds.jsonl` has it; `numbers` flattens it."""

    def close(self, ending: Mapping[str, Any] | None) -> None:  # noqa: B027 (nothing to close is fine)
        """The end: `summary.json` or `diverged.json`; None if the run was interrupted or failed."""


class TensorBoard(Tracker):
    """Event files in the run's folder: `tensorboard --logdir runs`."""

    package = "tensorboard"

    def __init__(self, folder: Path, settings: Mapping[str, Any], start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in numbers(record, "/").items():
            self.writer.add_scalar(name, value, record["round"])

    def close(self, ending: Mapping[str, Any] | None) -> None:
        self.writer.close()


class MLflow(Tracker):
    """A run of MLflow: at MLFLOW_TRACKING_URI, otherwise where MLflow itself puts runs, `mlflow.db` in the working
    directory; in the experiment MLFLOW_EXPERIMENT_NAME, by default "fedman"."""

    package = "mlflow"

    def __init__(self, folder: Path, settings: Mapping[str, Any], start: int) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a dead server takes seconds, not minutes
        from mlflow import MlflowClient

        self.client, id_file = MlflowClient(), folder / "mlflow.id"
        if start and id_file.exists():
            self.id = id_file.read_text()
            self.client.update_run(self.id, "RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedman")
        known = self.client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self.client.create_experiment(experiment)
        self.id = self.client.create_run(number, run_name=folder.name).info.run_id
        for key, value in settings.items():
            self.client.log_param(self.id, key, value)
        id_file.write_text(self.id)

    def log(self, record: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now, step = round(time.time() * 1000), record["round"]
        self.client.log_batch(self.id, [Metric(name, v, now, step) for name, v in numbers(record, "/").items()])

    def close(self, ending: Mapping[str, Any] | None) -> None:
        for word in ("diverged", "stopped"):
            if ending and word in ending:
                self.client.set_tag(self.id, word, ending[word])
        failed = ending is not None and "diverged" in ending
        self.client.set_terminated(self.id, "KILLED" if ending is None else "FAILED" if failed else "FINISHED")


class WandB(Tracker):
    """A run of Weights & Biases in the run's folder, in the project WANDB_PROJECT, by default "fedman". It is offline
    unless WANDB_MODE says otherwise; `wandb sync` uploads it."""

    package = "wandb"

    def __init__(self, folder: Path, settings: Mapping[str, Any], start: int) -> None:
        import wandb

        id_file = folder / "wandb.id"
        known = start and id_file.exists()
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedman"),
            mode=mode,
            dir=folder, name=folder.name, config=dict(settings), reinit="create_new",
            id=id_file.read_text() if known else None, resume="allow" if known and mode == "online" else None,
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        id_file.write_text(self.run.id)
        self.run.define_metric("*", step_metric="round")

    def log(self, record: Mapping[str, Any]) -> None:
        self.run.log({"round": record["round"], **numbers(record, "/")})

    def close(self, ending: Mapping[str, Any] | None) -> None:
        self.run.summary.update({word: ending[word] for word in ("diverged", "stopped") if ending and word in ending})
        self.run.finish(exit_code=255 if ending is None else int("diverged" in ending))


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def parse(log: str) -> dict[str, type[Tracker]]:
    """The trackers of a key `log` by name; `UserError` if there is no such tracker."""
    found: dict[str, type[Tracker]] = {}
    for name in log.split("+") if log else ():
        if "," in name:
            raise UserError(f"log: trackers are joined by +, as in tensorboard+mlflow, not {log!r}")
        if name not in TRACKERS and ":" not in name:
            raise UserError(f"log: no tracker named {name!r}{nearest(name, TRACKERS)}")
        kind = TRACKERS.get(name) or find("log", name)
        if not isinstance(kind, type) or not issubclass(kind, Tracker):
            raise UserError(f"log: {name} is not a subclass of fedman.Tracker")
        found[name] = kind
    return found


def require_packages(log: str) -> None:
    """`UserError` if the package of a tracker is not installed."""
    for name, kind in parse(log).items():
        if kind.package and find_spec(kind.package) is None:
            raise UserError(f"log: {name} is not installed; pip install {kind.package}")


def open_trackers(log: str, folder: Path, settings: Mapping[str, Any], start: int) -> dict[str, Tracker]:
    """The trackers of a run, opened, by name. One that cannot be opened is a `UserError`, and the others are closed."""
    kinds, opened = parse(log), dict[str, Tracker]()
    try:
        for name, kind in kinds.items():
            opened[name] = kind(folder, settings, start)
    except Exception as error:  # a tracker's package may raise anything
        for tracker in opened.values():
            with suppress(Exception):
                tracker.close(None)
        raise UserError(f"log: {name} cannot be opened ({describe(error)})") from error
    return opened


def numbers(record: Mapping[str, Any], joint: str) -> Numbers:
    """The numbers of a record but for its round; what it holds by name as `name.key`, with this joint.

    >>> numbers({"round": 3, "loss": 0.5, "cohort": [1, 4], "accuracy": {"all": 81.0}}, "/")
    {'loss': 0.5, 'accuracy/all': 81.0}
    """

    def flat() -> Iterator[tuple[str, Any]]:
        for name, value in record.items():
            if isinstance(value, dict):
                yield from ((f"{name}{joint}{key}", v) for key, v in value.items())
            else:
                yield name, value

    return {name: v for name, v in flat() if name != "round" and isinstance(v, int | float)}
