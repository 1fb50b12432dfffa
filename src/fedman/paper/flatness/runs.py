"""A finished run as a subject of measurement: one of its models on the training samples it has seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedman.data import Dataset, load, partition
from fedman.data.augment import channels_first, normalise
from fedman.data.images import holds_images
from fedman.errors import UserError
from fedman.runs.build import initial_model
from fedman.runs.experiment import read_models
from fedman.runs.folder import LOCAL, RunFolder

if TYPE_CHECKING:
    from fedman.config import Config

MODELS = ("all", "sel", "cloud")
Reading = Callable[[str, int, int], None]  # (what, done, of how much)


@dataclass(frozen=True)
class Finished:
    """What lies in the folder of a finished run."""

    folder: Path
    config: Config
    method: str
    weights: dict[str, dict[str, Tensor]]  # by name of the model

    @property
    def about(self) -> dict[str, Any]:
        """What tells this run from others, and all that decided its result."""
        keys = ("dataset", "partition", "clients", "model", "algorithm", "zeta", "rounds", "seed")
        config = {key: value for key, value in self.config.flat().items() if key not in LOCAL}
        return {"method": self.method} | {key: config[key] for key in keys} | {"config": config}


@dataclass(frozen=True)
class Selection:
    """Which training samples are looked at, and which of those are whose."""

    chosen: Tensor  # [n], indices into the data set in ascending order
    clients: list[Tensor]  # indices into `chosen`


@dataclass(frozen=True)
class Samples:
    """Training samples as a model sees them, not augmented, and which of them are whose."""

    x: Tensor
    y: Tensor
    clients: list[Tensor]

    def of(self, client: Tensor) -> tuple[Tensor, Tensor]:
        """A client's own."""
        return self.x[client], self.y[client]


def read_run(folder: Path) -> Finished:
    """A run's configuration and models; refused if it is not finished or not of this program."""
    from fedman.config import CUSTOM, read_toml, resolve  # pydantic: only at the edge

    files = RunFolder(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the folder of a finished run")
    if not files.config.exists():
        raise UserError(f"{folder}: not a run's folder (no config.toml)")
    config = resolve(read_toml(files.config))
    if not files.summary.exists():
        state = "diverged" if files.diverged.exists() else f"not finished; fedman run --out {folder} --resume"
        raise UserError(f"{folder}: this run is {state} (no summary.json)")
    if CUSTOM in (config.dataset, config.model):
        raise UserError(f"{folder}: a run of your own arrays or module; measure it in Python with fedman.flatness")
    try:
        method = str(json.loads(files.summary.read_bytes())["method"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{files.summary}: not a summary of this program") from None
    if not files.model.exists():
        raise UserError(f"{files.model}: no such file; the models of the run are needed")
    try:
        return Finished(folder, config, method, read_models(files.model))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{files.model}: cannot be read ({' '.join(str(error).split())})") from None


def read_data(run: Finished, data_dir: Path | None, reading: Reading | None) -> Dataset:
    """The run's data set, from where the run had it unless told."""
    return load(run.config.dataset, data_dir or run.config.data_dir, reading)


def restore(run: Finished, which: str, data: Dataset) -> nn.Module:
    """The run's model `which` as a module."""
    if which not in MODELS:
        raise UserError(f"model: {which!r} is not one of {', '.join(MODELS)}")
    if which not in run.weights:
        raise UserError(f"{RunFolder(run.folder).model}: holds no model {which!r}, only {', '.join(run.weights)}")
    model = initial_model(run.config.model, data, run.config.seed)
    try:
        model.load_state_dict(run.weights[which])
    except RuntimeError:
        raise UserError(f"{RunFolder(run.folder).model}: not weights of {run.config.model} for {data.name}") from None
    return model


def select_samples(run: Finished, data: Dataset, count: int | None, seed: int = 0) -> Selection:
    """All training samples, or `count` of them drawn at random."""
    n = len(data.y_train)
    if count is not None and not 1 <= count <= n:
        raise UserError(f"samples: {count}; 1 to {n} training samples are allowed")
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: count or n].sort().values
    place = torch.full((n,), -1)
    place[chosen] = torch.arange(len(chosen))
    c = run.config
    clients = partition.clients_of(data, c.partition, c.clients, seed=c.partition_seed, sigma=c.unbalanced)
    parts = [place[torch.as_tensor(part)] for part in clients]
    return Selection(chosen, [part[part >= 0] for part in parts])


def training_samples(data: Dataset, which: Selection, device: str, dtype: torch.dtype) -> Samples:
    """The selected samples normalised, on the device."""
    stored = torch.as_tensor(data.x_train)[which.chosen].to(device)
    x = normalise(stored, data.mean, data.std, dtype)
    x = channels_first(x).contiguous() if holds_images(stored) else x
    y = torch.as_tensor(data.y_train)[which.chosen].to(device)
    return Samples(x, y, [part.to(device) for part in which.clients])
