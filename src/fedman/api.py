"""`fedman.run`: a run in one Python call, with names or with objects of your own. `fedman.list_*`: the names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from fedman.aggregation import AGGREGATIONS, Aggregation
from fedman.algorithms import ALGORITHMS, Algorithm
from fedman.config import CUSTOM, KEYS, PARTS, resolve
from fedman.data import SPECS, Dataset, as_dataset, fingerprint, is_path, load
from fedman.data.partition import Partition, clients_of
from fedman.errors import UserError, shown
from fedman.execution.device import pick_device
from fedman.models import MODELS
from fedman.optimizers import OPTIMIZERS, LocalOptimizer
from fedman.paper.presets import PRESETS, find_preset
from fedman.penalties import PENALTIES, Penalty
from fedman.runs import experiment
from fedman.runs.records import Progress
from fedman.runs.result import Result
from fedman.tasks import TASKS, Task
from fedman.training.attacks import ATTACKS, Attack
from fedman.training.settings import BatchNorm, LrSchedule

NOT_YET = "custom-" + 12 * "0"
"""The name of a partition that was given in Python, until its parts are known."""


def run(
    *,
    # what is learnt, from which data, by which clients
    dataset: str | Path | Dataset | Sequence[Any] | dict[str, Any] | None = None,
    data_dir: str | Path | None = None,
    augment: bool | None = None,
    partition: Partition | None = None,
    partition_seed: int | None = None,
    unbalanced: float | None = None,
    validation: float | None = None,
    clients: int | None = None,
    participation: float | None = None,
    cohort: Literal["bernoulli", "fixed"] | None = None,
    schedule_seed: int | None = None,
    model: str | nn.Module | None = None,
    task: str | Task | None = None,
    # how
    algorithm: str | Algorithm | None = None,
    penalty: str | Penalty | None = None,
    zeta: float | None = None,
    aggregation: str | Aggregation | None = None,
    attack: str | Attack | None = None,
    rounds: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    optimizer: str | LocalOptimizer | None = None,
    keep_optimizer: bool | None = None,
    batch_norm: BatchNorm | None = None,
    lr: float | None = None,
    lr_schedule: LrSchedule | None = None,
    warmup: int | None = None,
    lr_decay: float | None = None,
    weight_decay: float | None = None,
    clip: float | None = None,
    seed: int | None = None,
    # what is measured, where it runs, what is written
    target: float | None = None,
    eval_every: int | None = None,
    eval_others_every: int | None = None,
    precision: Literal["auto", "fp64", "fp32", "tf32", "bf16"] | None = None,
    execution: Literal["auto", "kernels", "vmap", "branches", "plain"] | None = None,
    deterministic: bool | None = None,
    chunk: int | None = None,
    checkpoint_seconds: float | None = None,
    keep_state: bool | None = None,
    log: str | None = None,
    preset: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Progress = lambda record: None,
    **hyper: bool | int | float | str | None,
) -> Result:
    """Train a federation and return its records and models.

    The parameters are the keys of `fedman run`, which `fedman list` explains. What is omitted or None has the preset's
    value, or the default. Some take objects of your own as well:

    - `dataset`: arrays (x_train, y_train, x_test, y_test), or all else that `fedman.data.as_dataset` takes. Clients
      that the data have themselves (`fedman.data.from_clients`) are the run's, unless a partition is named.
    - `partition`: a list of index arrays, a client's number for each sample, or a function (labels, clients, seed) that
      returns either.
    - `model`: an `nn.Module`, whose weights are the start; or `module:builder`.
    - `algorithm`, `task`, `penalty`, `optimizer`, `aggregation`, `attack`: an instance, whose fields are its
      hyper-parameters; or `module:Name`.

    `hyper` are the hyper-parameters of parts given by name. `preset` and `device` ("auto", "cpu", "cuda", "cuda:1") are
    those of the command. `progress` is called with the record of every round; it may
    raise `fedman.StopRun("why")`, which ends the run after that round, with a summary that says so. With `out`
    everything is written to that folder, and `resume` goes on from the last checkpoint there.

    >>> result = run(clients=10, rounds=2, algorithm="feddc", alpha=0.1, zeta=0.15)
    >>> sorted(result.models)
    ['all', 'cloud', 'sel']
    """
    dataset = str(dataset) if isinstance(dataset, Path) else dataset
    keys = {key: value for key, value in {**locals(), **hyper}.items() if key in KEYS or key in hyper}
    keys = {key: _plain(value) for key, value in keys.items() if value is not None}
    mistakes: list[str] = []
    base = data = None
    with _noted(mistakes):
        base = find_preset(preset if isinstance(preset, str | None) else shown(preset))
    with _noted(mistakes):
        pick_device(device if isinstance(device, str) else shown(device))
    if dataset is not None and not isinstance(dataset, str):
        keys["dataset"] = CUSTOM
        with _noted(mistakes):
            data = as_dataset(dataset)
            keys["dataset"] = data.name if data.name in SPECS or is_path(data.name) else CUSTOM
    if model is not None and not isinstance(model, str):
        keys["model"] = CUSTOM
        if not isinstance(model, nn.Module):
            mistakes.append(f"model: {shown(model)} is neither a name nor an nn.Module")
    for kind in PARTS:
        if not isinstance(keys.get(kind, ""), str):
            mistakes += _take_apart(kind, keys)
    own_partition = callable(partition) or (hasattr(partition, "__len__") and not isinstance(partition, str))
    if own_partition:
        keys["partition"] = NOT_YET
    mistakes += _wrong_options(out, resume, progress, log)
    config = resolve(keys, base, data=data, mistakes=mistakes)

    parts = None
    if partition is not None and own_partition:
        data = data or load(*config.source)
        count = config.clients if callable(partition) else clients
        parts = clients_of(data, partition, count, seed=config.partition_seed, sigma=config.unbalanced)
        named = {"partition": f"custom-{fingerprint(parts)}", "clients": len(parts)}
        config = config.model_copy(update=named)
    return experiment.run(
        config,
        data=data,
        model=model if isinstance(model, nn.Module) else None,
        parts=parts,
        out=out,
        resume=resume,
        device=device,
        progress=progress,
        warn=lambda message: warnings.warn(message, stacklevel=3),
        own_data=not isinstance(dataset, str | None),
    )


@contextmanager
def _noted(mistakes: list[str]) -> Iterator[None]:
    """Note a `UserError`, to be told with the others."""
    try:
        yield
    except UserError as error:
        mistakes.append(str(error))


def _plain(value: Any) -> Any:
    """A value as a configuration holds it: no numpy scalars, no paths."""
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Path) else value


def _take_apart(kind: str, keys: dict[str, Any]) -> Iterable[str]:
    """Put name and hyper-parameters of the instance `keys[kind]` into `keys`; a line for each mistake."""
    part, registry = keys.pop(kind), PARTS[kind]
    if isinstance(part, type) and issubclass(part, registry.base):
        yield f"{kind}: {part.__name__} is a class; give an instance, {part.__name__}(...)"
        return
    try:
        keys[kind] = registry.name_of(part)
    except UserError as error:
        yield str(error)
        return
    for field in fields(part):
        own, given = getattr(part, field.name), keys.get(field.name)
        if given is not None and (not isinstance(given, bool | int | float | str) or given != own):
            yield f"{field.name}: {shown(given)} is not that of {kind}={shown(part)}; leave one of them out"
        keys[field.name] = own


def _wrong_options(out: Any, resume: bool, progress: Any, log: Any) -> Iterable[str]:
    if out == "" or not isinstance(out, str | Path | None):
        yield f"out: {shown(out)} is not the path of a folder"
    if resume and out is None:
        yield "resume: name the run's folder with out"
    if log and out is None:
        yield "log: name the run's folder with out"
    if not callable(progress):
        yield f"progress: {shown(progress)} is not a function of a record"


def _lister(title: str, names: Iterable[str]) -> Callable[[], list[str]]:
    """`fedman.list_*`: a function that returns names."""

    def listed() -> list[str]:
        return list(names)

    listed.__doc__ = f"The names of all {title}; `fedman list` says more."
    return listed


list_algorithms = _lister("algorithms", ALGORITHMS)
list_tasks = _lister("tasks", TASKS)
list_penalties = _lister("penalties", PENALTIES)
list_optimizers = _lister("local optimisers", OPTIMIZERS)
list_aggregations = _lister("aggregation rules", AGGREGATIONS)
list_attacks = _lister("attacks", ATTACKS)
list_models = _lister("models", MODELS)
list_datasets = _lister("data sets", SPECS)
list_presets = _lister("presets", PRESETS)
