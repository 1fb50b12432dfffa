"""A run on Flower from the server's side: records, checkpoints and resume are those of any other run."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
from flwr.serverapp import Grid

from fedman.config import CUSTOM, PARTS, Config
from fedman.data import is_path, load
from fedman.data.images import holds_images
from fedman.errors import Interrupted, UserError
from fedman.execution.base import Batch
from fedman.execution.device import matmul_precision, pick_device
from fedman.execution.executor import Stopped
from fedman.flower.accepted_uploads import AcceptedUploads
from fedman.flower.backend import FlowerBackend
from fedman.flower.messages import SampleKind
from fedman.flower.roster import Roster, read_roster
from fedman.flower.screen import VARIANCE
from fedman.flower.server_options import ServerOptions, refuse_changed, save_options
from fedman.parts import hyperparameters
from fedman.runs import checkpoint
from fedman.runs.atomic import writing
from fedman.runs.build import Built, build
from fedman.runs.experiment import finished_result, play
from fedman.runs.folder import RunFolder
from fedman.runs.records import Progress, decisive
from fedman.runs.result import Result
from fedman.runs.run_under_way import Run
from fedman.runs.signals import stop_on_signal
from fedman.trackers import require_packages

FAILED = "failed.json"
"""The file in a run's folder that says why it ended early, until it goes on."""

Stopping = tuple[threading.Event, list[int]]
"""What ends a run early, and the signal that asked for it: see `stop_on_signal`."""


def serve(
    grid: Grid,
    config: Config,
    service: ServerOptions,
    *,
    out: str | Path,
    resume: bool = False,
    device: str = "auto",
    stopping: Stopping | None = None,
    progress: Progress = lambda record: None,
    warn: Callable[[str], object] = lambda message: None,
) -> Result:
    """Play a run's rounds with the clients on the grid, from its last checkpoint where `resume` is set.

    There is a checkpoint after every round. `stopping` is for callers whose main thread is another.
    """
    refuse_simulated(config)
    require_packages(config.log)
    if done := finished_result(config, out, resume):
        return done
    if config.aggregation != PARTS["aggregation"].default:  # what a client's last model counted as is not kept here
        service = service.model_copy(update={"keep_last": False})
    config = config.model_copy(update={"checkpoint_seconds": 0.0, "keep_state": False})
    data = load(*config.source)
    parts = None
    if service.sizes is not None:
        if len(service.sizes) != config.clients:
            raise UserError(f"sizes: has {len(service.sizes)} numbers for {config.clients} clients")
        parts = [np.arange(n) for n in service.sizes]
    stop, caught = stopping or (threading.Event(), [])
    with ExitStack() as stack:
        built = build([config], data, pick_device(device), stopping=stop, parts=parts)
        stack.enter_context(matmul_precision(built.precision))
        (federation,) = built.federations
        uploads = Path(out) / "uploads"
        store = AcceptedUploads(federation.initial_model, uploads if service.keep_last else None)
        keys = read_roster(Path(service.roster).expanduser(), config.clients) if service.roster else None
        sizes = federation.samples.sizes(range(config.clients))
        bound = store.keys if service.bind_keys else {}
        roster = Roster(grid, sizes, service.sizes is not None, stop, keys, bound)
        kind = SampleKind(data.shape, data.classes, holds_images(data.x_train), data.mean, data.std)
        told = {"settings": _settings(config, service), "samples": json.dumps(asdict(kind))}
        buffers = built.executor.execution.buffers
        variances = buffers.where(name.endswith(VARIANCE) for name in buffers.names)
        backend = FlowerBackend(federation, store, roster, service, **told, terms=_terms(built), variances=variances)
        folder = stack.enter_context(RunFolder(out))
        folder.refuse_unfit(resume)
        if resume:
            refuse_changed(folder.path, service)
            checkpoint.refuse_other(folder.checkpoint, config.flat())
        with writing(folder.path / FAILED):
            (folder.path / FAILED).unlink(missing_ok=True)
        if stopping is None:
            caught = stack.enter_context(stop_on_signal(stop))
        try:
            roster.wait(service.wait)
        except Stopped:
            raise Interrupted(caught[0], f"{folder.path}: interrupted before the clients were there") from None
        if not resume:  # before there is a run that could be resumed
            save_options(folder.path, service)
        state = federation.start(store, keep_all=service.keep_last)
        run = stack.enter_context(Run(config, federation, state, built, folder, resume, progress, warn))
        if resume:
            save_options(folder.path, service)
        (result,) = play([run], backend, caught)
    if isinstance(result, Exception):
        raise result
    shutil.rmtree(uploads, ignore_errors=True)
    return result


def refuse_simulated(config: Config) -> None:
    """What only those can do who train the clients and hold their samples, which a server does not."""
    if config.validation:
        where = "is for `fedman run` and `sweep`; on Flower the training samples stay with the clients"
        raise UserError(f"validation: {config.validation:g} {where}")
    if config.attack != PARTS["attack"].default:
        raise UserError(f"attack: {config.attack} is for `fedman run` and `sweep`; on Flower nobody attacks on request")


def _settings(config: Config, service: ServerOptions) -> str:
    """The configuration as clients are told it. A file on this machine and the server's aggregation rule are none of
    their business."""
    rule = "aggregation", *hyperparameters(PARTS["aggregation"][config.aggregation])
    flat = {key: value for key, value in decisive(config.flat()).items() if key not in rule}
    if service.sizes is not None or is_path(config.dataset):
        flat["dataset"] = CUSTOM
    return json.dumps(flat, sort_keys=True)


def _terms(built: Built) -> list[str]:
    """The names of the penalty's terms, which are known after a forward pass."""
    (federation,), execution = built.federations, built.executor.execution
    x, y = federation.samples.test(0, 1, federation.dtype)
    if not execution.terms:
        execution.penalty_terms(federation.initial[None], Batch(x[None], y[None]))
    return execution.terms
