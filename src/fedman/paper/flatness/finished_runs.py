"""Reads finished runs for measurement: their configuration, models and training samples."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from fedman.config import CUSTOM, Config, resolve
from fedman.data import Dataset, partition, validation
from fedman.errors import UserError
from fedman.models import takes_ids
from fedman.paper.flatness.flatness_json import MeasuredRun
from fedman.runs.build import initial_model, on_device
from fedman.runs.folder import RunFolder
from fedman.runs.records import Summary, decisive

MODELS = ("all", "sel", "cloud")
IDENTITY = ("dataset", "partition", "clients", "model", "algorithm", "zeta", "rounds", "seed")
Follow = Callable[[str, int, int], None]  # called with what is done, how much of it, and of how much at most


@dataclass(frozen=True)
class FinishedRun:
    """The contents of a finished run's folder."""

    folder: Path
    config: Config
    weights: dict[str, dict[str, Tensor]]  # by name of the model
    precision: str  # in which it was trained

    @property
    def about(self) -> MeasuredRun:
        """What identifies this run, and the configuration that determined its result."""
        settings = decisive(self.config.flat()) | {"precision": self.precision}
        identity = {key: settings[key] for key in IDENTITY}
        return cast(MeasuredRun, {"method": self.config.method, **identity, "config": settings})


@dataclass(frozen=True)
class Selection:
    """The training samples to measure on, and which of them each client holds."""

    chosen: Tensor  # [n], indices into the data set in ascending order
    clients: list[Tensor]  # indices into `chosen`


def read_run(folder: Path) -> FinishedRun:
    """A run's configuration and models; an error if it is not finished or not a run of this program."""
    files = RunFolder(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the folder of a finished run")
    if not files.config.exists():
        raise UserError(f"{folder}: not a run's folder (no {files.config.name})")
    try:
        config = resolve(files.read_config())
    except UserError as error:  # such as a part of the user's own that is not where it was
        raise UserError(f"{folder}: {error}") from None
    if not files.summary.exists():
        resume = f"is not finished; fedman run --out {shlex.quote(str(folder))} --resume"
        state = "diverged" if files.diverged.exists() else resume
        raise UserError(f"{folder}: this run {state} (no {files.summary.name})")
    summary = cast(Summary, files.ending())
    if CUSTOM in (config.dataset, config.model):
        raise UserError(f"{folder}: a run of your own arrays or module; measure it in Python with fedman.flatness")
    return FinishedRun(folder, config, files.read_models(), summary["precision"])


def restore(run: FinishedRun, which: str, data: Dataset) -> nn.Module:
    """The run's model `which` as a module."""
    if which not in run.weights:
        raise UserError(f"{RunFolder(run.folder).model}: holds no model {which!r}, only {', '.join(run.weights)}")
    model = initial_model(run.config.model, data, run.config.make_task(), run.config.seed)
    try:
        model.load_state_dict(run.weights[which])
    except RuntimeError:
        raise UserError(f"{RunFolder(run.folder).model}: not weights of {run.config.model} for {data.name}") from None
    return model


def select_samples(run: FinishedRun, data: Dataset, count: int | None, seed: int = 0) -> Selection:
    """All training samples, or `count` of them drawn at random."""
    c = run.config
    trained = torch.ones(len(data.y_train), dtype=torch.bool)
    if c.validation:
        trained[torch.as_tensor(validation.held_out(data.y_train, c.validation, c.partition_seed))] = False
    pool = trained.nonzero()[:, 0]
    n = len(pool)
    if count is not None and not 1 <= count <= n:
        raise UserError(f"samples: {count}; 1 to {n} training samples are allowed")
    chosen = pool[torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: count or n].sort().values]
    place = torch.full((len(trained),), -1)
    place[chosen] = torch.arange(len(chosen))
    clients = partition.clients_of(data, c.partition, c.clients, seed=c.partition_seed, sigma=c.unbalanced)
    parts = [place[torch.as_tensor(part)] for part in clients]
    return Selection(chosen, [part[part >= 0] for part in parts])


def training_samples(
    model: nn.Module, data: Dataset, which: Selection, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The selected samples as a model sees them, normalised and not augmented, and their targets."""
    samples = on_device(data, "cpu", False, takes_ids(model))
    x, y = samples.x[which.chosen].to(device), samples.y[which.chosen].to(device)
    return samples.inputs(x, dtype).contiguous(), y
