"""A run from its configuration to its result, and several stacked: plan, train, aggregate, evaluate, record.

`play` is the path of a round; everything else here opens and closes runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedman.backends.base import Backend
from fedman.config import Config
from fedman.data import Dataset, is_path, load
from fedman.errors import Diverged, Interrupted
from fedman.execution.device import determinism, matmul_precision, pick_device
from fedman.execution.executor import Stopped
from fedman.runs import checkpoint, row_file
from fedman.runs.build import build
from fedman.runs.folder import RunFolder
from fedman.runs.inputs import fingerprints, refuse_other_inputs
from fedman.runs.records import Progress
from fedman.runs.result import Result
from fedman.runs.row_file import RowFile
from fedman.runs.run_under_way import Run
from fedman.runs.signals import stop_on_signal
from fedman.trackers import require_packages
from fedman.training.aggregate import collect
from fedman.training.federation import Assignment

BUILDING = threading.RLock()
"""torch has one generator for all threads: of runs that start in several, one after the other draws initial weights."""


def run(
    config: Config,
    *,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    parts: Sequence[np.ndarray] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Progress = lambda record: None,
    warn: Callable[[str], object] = lambda message: None,
    own_data: bool = False,
) -> Result:
    """Run a configuration to its end, or from its last checkpoint to its end.

    `data`, `model` and `parts` (the samples of each client) are those that the configuration cannot name; of `own_data`
    it may have a name, but the samples are others. With `out`, everything is written there.
    """
    if resume and data is None and is_path(config.dataset):
        data = load(*config.source)
    inputs = fingerprints(data, model, own_data) if resume else {}
    if out is not None and (done := finished_result(config, out, resume, inputs)):
        return done
    data = data or load(*config.source)
    (result,) = run_stacked([config], data, [out], resume, device, [progress], warn, model, parts, own_data)
    if isinstance(result, Diverged):
        raise result
    return result


def run_stacked(
    configs: Sequence[Config],
    data: Dataset,
    outs: Sequence[str | Path | None],
    resume: bool,
    device: str,
    progress: Sequence[Progress],
    warn: Callable[[str], object],
    model: nn.Module | None = None,
    parts: Sequence[np.ndarray] | None = None,
    own_data: bool = False,
) -> list[Result | Diverged]:
    """Several runs side by side, their clients stacked into one chunk: those with one `stack_key`."""
    device = pick_device(device)
    for config in configs:
        require_packages(config.log)
    with ExitStack() as stack:
        stack.enter_context(determinism(configs[0].deterministic, device))
        stack.enter_context(torch.inference_mode(False))  # whatever the caller has switched off
        stack.enter_context(torch.enable_grad())
        with BUILDING:
            built = build(configs, data, device, model=model, parts=parts, whole_run=True)
        stack.enter_context(matmul_precision(built.precision))
        if built.executor.execution.compiled:
            warn("compiling the model before the first rounds, for up to two minutes; less if it was compiled before")
        folders = [stack.enter_context(RunFolder(out)) if out is not None else None for out in outs]
        caught = stack.enter_context(stop_on_signal(built.executor.stopping)) if any(folders) else []
        timer = checkpoint.Timer(min(config.checkpoint_seconds for config in configs))
        until = checkpoint.common_round([folder.checkpoint for folder in folders if folder]) if all(folders) else None
        inputs = fingerprints(data, model, own_data) if any(folders) else {}
        runs = []
        for config, federation, folder, say in zip(configs, built.federations, folders, progress, strict=True):
            file = folder.checkpoint / row_file.NAME if folder else None
            rows = federation.rows(stack.enter_context(RowFile(file, federation.first_row)) if file else None)
            rows.require_room(_participants(config), on_disk=config.keep_state)
            state = federation.start(rows)
            run = Run(config, federation, state, built, folder, resume, say, warn, timer, until, inputs)
            runs.append(stack.enter_context(run))
        for run in runs if len(runs) > 1 else ():
            if run.state.round == 0:
                run.save_checkpoint()  # a round that all have, until each has written the next
        built.rehearse(planned_rounds(runs), runs[0].federation.models(runs[0].state)["cloud"])
        return play(runs, built.in_process, caught)


def play(runs: list[Run], backend: Backend, caught: list[int]) -> list[Result | Diverged]:
    """All rounds of all runs; those at the same round are worked on together. `caught` holds the signal to stop.

    While a GPU works on a round, the host writes the records of the round before; else they are written at once.
    """
    rounds = runs[0].config.rounds  # of all: see `stack_key`
    backend.prepare(planned_rounds(runs))
    while left := [run for run in runs if run.end is None]:
        if done := [run for run in left if run.done]:
            for run in done:
                run.record()
            for run in done:
                run.finish()
            continue
        t = min(run.state.round for run in left)
        now = [run for run in left if run.state.round == t]
        plans = [run.plan(t) for run in now]
        upcoming = [run.plan(t + 1) for run in now if t + 1 < rounds]
        try:
            trained = backend.train(plans, upcoming)
        except Stopped:
            for run in left:
                run.record()
                run.save_checkpoint()
            where = " ".join(str(run.folder.path) for run in runs if run.folder)
            raise Interrupted(caught[0], f"round {t} is saved in {where}") from None
        for run in now:
            run.record()
        going = [i for i, run in enumerate(now) if not run.stopped]  # by the record just written, of the round before
        outcomes = collect([plans[i] for i in going], [trained[i] for i in going]) if going else ()
        for run, outcome in zip([now[i] for i in going], outcomes, strict=True):
            if isinstance(outcome, Diverged):
                run.diverge(outcome)
            else:
                run.evaluate(outcome)
                if not backend.queues:
                    run.record()
    return [run.end for run in runs if run.end is not None]


def planned_rounds(runs: Sequence[Run]) -> Iterator[list[Assignment]]:
    """The rounds that are left, each of all runs."""
    for t in range(min(run.state.round for run in runs), runs[0].config.rounds):
        yield [run.plan(t) for run in runs]


def _participants(config: Config) -> float:
    """How many clients will have taken part by the end, on average: N·(1 − (1 − participation)^T)."""
    return config.clients * (1 - (1 - config.participation) ** config.rounds)


def finished_result(config: Config, out: str | Path, resume: bool, inputs: Mapping[str, str] = {}) -> Result | None:
    """The result of a run that is done already; None if there is work left. `Diverged` where it ended so.

    A folder that holds a run is refused, unless to resume it, and one that holds none is refused to resume. So is one
    whose run is of other `inputs`, as far as these are known.
    """
    folder = RunFolder(out)
    folder.refuse_unfit(resume)
    ending = folder.finished(config.flat(), go_on=True)
    if ending is None:
        return None
    refuse_other_inputs(folder.path, ending.get("inputs", {}), inputs)
    if "diverged" in ending:
        raise Diverged(ending["diverged"])
    return Result(ending, folder.read_rounds(), folder.read_models(), folder.path)
