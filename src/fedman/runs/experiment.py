"""A run from its configuration to its result, and several stacked: plan, train, aggregate, evaluate, record.

`play` is the path of a round; everything else here opens and closes runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

from fedman.backends.base import Backend
from fedman.config import Config
from fedman.data import Dataset, load
from fedman.errors import Diverged, Interrupted, UserError
from fedman.execution.device import device_name, matmul_precision, pick_device
from fedman.execution.executor import Stopped
from fedman.execution.transfer import Fetched
from fedman.runs import checkpoint
from fedman.runs.build import Built, build
from fedman.runs.folder import RunFolder
from fedman.runs.records import Divergence, Headline, Progress, RoundRecord, Summary, figure, figures
from fedman.runs.result import Result
from fedman.runs.signals import stop_on_signal
from fedman.runs.tensorboard import tensorboard
from fedman.runs.version import version
from fedman.training.aggregate import Outcome, collect
from fedman.training.evaluate import spread
from fedman.training.federation import Assignment, Federation
from fedman.training.round import Schedule
from fedman.training.state import RunState


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
) -> Result:
    """Run a configuration to its end, or from its last checkpoint to its end.

    `data`, `model` and `parts` (the samples of each client) are those that the configuration cannot name. With `out`,
    everything is written there.
    """
    if out is not None and (done := finished_result(config, out, resume)):
        return done
    data = data or load(*config.source)
    (result,) = run_stacked([config], data, [out], resume, device, [progress], warn, model, parts)
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
) -> list[Result | Diverged]:
    """Several runs side by side, their clients stacked into one chunk: `stackable` says which can be."""
    device = pick_device(device)
    with ExitStack() as stack:
        built = build(configs, data, device, model=model, parts=parts)
        stack.enter_context(matmul_precision(built.precision))
        folders = [stack.enter_context(RunFolder(out)) if out is not None else None for out in outs]
        caught = stack.enter_context(stop_on_signal(built.executor.stopping)) if any(folders) else []
        runs = []
        for config, federation, folder, say in zip(configs, built.federations, folders, progress, strict=True):
            if folder and config.tensorboard:
                say = stack.enter_context(tensorboard(folder, say))
            runs.append(Run(config, federation, federation.start(), built, folder, resume, say, warn))
        return play(runs, built.in_process, caught)


class Run:
    """A run under way: its state, its records, its folder, and in the end its result."""

    def __init__(
        self,
        config: Config,
        federation: Federation,
        state: RunState,
        built: Built,
        folder: RunFolder | None,
        resume: bool,
        progress: Progress,
        warn: Callable[[str], object],
    ) -> None:
        self.config, self.federation, self.state, self.built = config, federation, state, built
        self.folder, self.progress, self.stacked = folder, progress, len(built.federations)
        self.settings = config.flat()
        self.headline = Headline.of(built.evaluator.task)
        self.schedule = Schedule(config.clients, config.participation, config.cohort, config.schedule_seed)
        self.before = 0.0  # seconds before a resume
        self.records: list[RoundRecord] = []
        self.pending: tuple[Outcome, dict[str, Fetched], Fetched | None] | None = None  # a round not recorded yet
        self.end: Result | Diverged | None = None
        self.extended_from: int | None = None  # `rounds` before it was raised, until the next record says so
        if folder:
            self._open(folder, resume, warn)
        self.started = self.saved = self.clock = time.perf_counter()

    def _open(self, folder: RunFolder, resume: bool, warn: Callable[[str], object]) -> None:
        """Begin to write to the folder, which is locked by now: what others did to it before is known."""
        if not resume:
            folder.refuse_used()
        elif folder.finished(self.settings) is not None:
            raise UserError(f"{folder.path}: another process has just finished this run; repeat the command")
        elif found := checkpoint.restore(folder.checkpoint, self.state, self.settings, warn):
            if not folder.is_checked:
                warn(f"{folder.path}: written by an earlier version, without checksums; its records are not checked")
            self.before, rounds = found["seconds"], int(found["config"]["rounds"])
            self.extended_from = rounds if rounds < self.config.rounds else None
        self.records = folder.start(self.state.round, self.settings)

    @property
    def spent(self) -> float:
        """Seconds, those before a resume included. Of runs stacked together, each has its share of the time."""
        return self.before + (time.perf_counter() - self.started) / self.stacked

    def plan(self, t: int) -> Assignment:
        """Round t, counted from 0, from the present state."""
        return Assignment(self.federation, self.state, self.schedule.round(t, self.federation.training))

    def evaluate(self, outcome: Outcome) -> None:
        """After a round: start to evaluate what is due. The record follows when the figures are there."""
        done, models = self.state.round, self.federation.models(self.state)
        scores: dict[str, Fetched] = {}
        for name, w in models.items():
            every = self.config.eval_every if name == "all" else self.config.eval_others_every
            if done == self.config.rounds or done % every == 0:
                same = name == "cloud" and "sel" in scores and w is models["sel"]
                each = name == next(iter(models)) and self._by_client(done)
                scores[name] = scores["sel"] if same else Fetched(self.built.evaluator.scores(w, each))
        self.pending = outcome, scores, self._personal(models) if self._by_client(done) else None
        if self.federation.device.type == "cpu":
            self.record()

    def _personal(self, models: Mapping[str, torch.Tensor]) -> Fetched | None:
        """The scores of the clients' own models on their own test sets, where they keep parts of them."""
        if self.federation.own is None:
            return None
        model = next(iter(models.values()))
        own = partial(self.federation.personal_model, self.state, model)
        return Fetched(self.built.evaluator.personal_scores(own))

    def _by_client(self, done: int) -> bool:
        """Whether the clients' own test sets are due."""
        due = done == self.config.rounds or done % self.config.eval_others_every == 0
        return due and self.built.evaluator.parts is not None

    def record(self) -> None:
        """Write the record of the round that was evaluated, if there is one; save; tell."""
        if self.pending is None:
            return
        (outcome, scores, personal), self.pending = self.pending, None
        evaluator = self.built.evaluator
        rows = {name: v.values() for name, v in scores.items()}
        graded = {name: evaluator.grade(v) for name, v in rows.items()}
        names = list(next(iter(graded.values()))[0]) if graded else [self.headline.name]
        names.sort(key=lambda name: name != self.headline.name)
        now = time.perf_counter()
        values = {
            "round": self.state.round,
            **{name: v for name, v in vars(outcome).items() if name != "transfers" and v is not None},
            **(vars(outcome.transfers) if outcome.transfers else {}),
            **{figure: {name: found[figure] for name, (found, _) in graded.items()} for figure in names},
            "test_loss": {name: loss for name, (_, loss) in graded.items()},
            "seconds": round((now - self.clock) / self.stacked, 4),
        }
        own = [personal.values()] if personal is not None else [v for v in rows.values() if len(v) > 1]
        if own:
            each = evaluator.by_client(own[0])
            values["clients"] = spread(each, evaluator.task.higher_is_better)
            if self.state.round == self.config.rounds:
                values["clients"] |= {"each": each}
        record = cast(RoundRecord, values)
        if self.extended_from is not None:
            record["extended_from"], self.extended_from = self.extended_from, None
        self.clock = now
        self.records.append(record)
        if self.folder:
            self.folder.append(record)
            if now - self.saved >= self.config.checkpoint_seconds and self.state.round < self.config.rounds:
                self.save_checkpoint()
                self.saved = time.perf_counter()
        self.progress(record)

    def save_checkpoint(self) -> None:
        """Write a checkpoint."""
        if self.folder:
            self.folder.sync()
            checkpoint.save(self.folder.checkpoint, self.state, self.settings, self.spent)

    def diverge(self, error: Diverged) -> None:
        """Note why there will be no summary."""
        self.end = error
        about: Divergence = {
            "diverged": str(error),
            "round": self.state.round + 1,
            "config": self.settings,
            "version": version(),
        }
        if self.folder:
            self.folder.write_ending(about)

    def finish(self) -> None:
        """Write the last record, the summary and the models; of the checkpoints the last at most is kept."""
        self.record()
        last = self.records[-1]
        values = {
            "method": self.config.method,
            "config": self.settings,
            **figures(last),
            "test_loss": last["test_loss"],
            "rounds_to_target": rounds_to_target(self.records, self.config.target, self.headline),
            "seconds": round(self.spent, 3),
            "device": device_name(self.federation.device),
            "precision": self.built.precision,
            "version": version(),
            "torch": torch.__version__,
        }
        summary = cast(Summary, values)
        if self.headline != Headline():
            summary["headline"], summary["lower_is_better"] = self.headline.name, self.headline.lower_is_better
        if "clients" in last:
            summary["clients"] = last["clients"]
        if self.stacked > 1:
            summary["stacked"] = self.stacked
        if extended := [record["round"] - 1 for record in self.records if "extended_from" in record]:
            summary["extended"] = extended
        execution = self.built.executor.execution
        models = {name: execution.state_dict(w) for name, w in self.federation.models(self.state).items()}
        if self.folder:
            self.folder.write_models(models)
            if self.config.keep_state:
                self.save_checkpoint()
            self.folder.write_ending(summary)
            checkpoint.prune(self.folder.checkpoint, keep=int(self.config.keep_state))
        self.end = Result(summary, self.records, models, self.folder.path if self.folder else None)


def play(runs: list[Run], backend: Backend, caught: list[int]) -> list[Result | Diverged]:
    """All rounds of all runs; those at the same round are worked on together. `caught` holds the signal to stop.

    While a GPU works on a round, the host writes the records of the round before.
    """
    rounds = runs[0].config.rounds  # of all: see `stackable`
    backend.prepare([run.plan(t) for run in runs] for t in range(min(run.state.round for run in runs), rounds))
    while left := [run for run in runs if run.end is None]:
        t = min(run.state.round for run in left)
        now = [run for run in left if run.state.round == t]
        if t >= rounds:
            for run in now:
                run.finish()
            continue
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
        for run, outcome in zip(now, collect(plans, trained), strict=True):
            if isinstance(outcome, Diverged):
                run.diverge(outcome)
            else:
                run.evaluate(outcome)
    return [run.end for run in runs if run.end is not None]


def finished_result(config: Config, out: str | Path, resume: bool) -> Result | None:
    """The result of a run that is done already; None if there is work left. `Diverged` where it ended so.

    A folder that holds a run is refused, unless to resume it, and one that holds none is refused to resume.
    """
    folder = RunFolder(out)
    folder.refuse_unused() if resume else folder.refuse_used()
    ending = folder.finished(config.flat())
    if ending is None:
        return None
    if "diverged" in ending:
        raise Diverged(ending["diverged"])
    return Result(ending, folder.read_rounds(), folder.read_models(), folder.path)


def rounds_to_target(records: list[RoundRecord], target: float | None, headline: Headline) -> int | None:
    """The first round (counted from 1) in which `all` reaches the target; None if it never does."""
    if target is None:
        return None
    curve = ((r["round"], figure(r, headline.name).get("all")) for r in records)
    return next((t for t, value in curve if value is not None and headline.reaches(value, target)), None)
