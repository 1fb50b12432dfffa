"""A run: data, clients, rounds, evaluation, records, checkpoints, resume. Follow the data from here.

experiment.run -> engine.Engine.round -> one file of algorithms/
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from fedman.backends.flight import Flight, launch, rehearse
from fedman.data import Dataset, load
from fedman.errors import Diverged, Interrupted
from fedman.execution.device import device_name, matmul_precision, pick_device
from fedman.execution.transfer import Fetched
from fedman.runs import checkpoint
from fedman.runs.build import make_engine, on_device
from fedman.runs.folder import RunFolder
from fedman.runs.records import Divergence, RoundRecord, Summary, decisive
from fedman.runs.signals import stop_on_signal
from fedman.runs.tensorboard import log_round, tensorboard
from fedman.runs.version import version
from fedman.training.engine import Engine, Outcome
from fedman.training.local_steps import Stopped
from fedman.training.randomness import cohort
from fedman.training.state import Federation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from fedman.config import Config

Progress = Callable[[RoundRecord], object]


@dataclass(frozen=True)
class Result:
    """A finished run."""

    summary: Summary
    rounds: list[RoundRecord]  # the records, one a round
    models: dict[str, dict[str, Tensor]]  # "all", "sel", "cloud": parameters by name, for load_state_dict

    @property
    def accuracy(self) -> float:
        """The headline: test accuracy of `all`, the mean of all clients' last models, in percent.

        Where that mean is not kept (a federation on Flower can do without), it is that of the server's model.
        """
        accuracy = self.summary["accuracy"]
        return accuracy.get("all", accuracy["cloud"])


def run(
    config: Config,
    *,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Progress = lambda record: None,
    warn: Callable[[str], object] = lambda message: None,
) -> Result:
    """Run a configuration to its end, or from its last checkpoint to its end.

    `data` and `model` replace the configuration's own by name. With `out`, everything is written there.
    """
    if out is not None and not resume:
        RunFolder(out).refuse_used()
    if out is not None and resume and (done := finished_result(config, out)):
        return done
    data = data or load(config.dataset, config.data_dir)
    (result,) = run_stacked(
        [config], data, [out], model=model, resume=resume, device=device, progress=[progress], warn=warn
    )
    if isinstance(result, Diverged):
        raise result
    return result


def run_stacked(
    configs: Sequence[Config],
    data: Dataset,
    outs: Sequence[str | Path | None],
    *,
    model: nn.Module | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Sequence[Progress],
    warn: Callable[[str], object] = lambda message: None,
) -> list[Result | Diverged]:
    """Several runs side by side, their clients stacked into one chunk: `stackable` says which can be."""
    device = pick_device(device)
    with ExitStack() as stack:
        shared = on_device(data, device)
        engines = [make_engine(config, data, shared, model, device) for config in configs]
        stack.enter_context(matmul_precision(engines[0].precision))
        longest = max(engine.samples.longest for engine in engines)
        for engine in engines:  # of one stack: plans of one shape, one set of graphs, one stop
            engine.graphs, engine.stopping = engines[0].graphs, engines[0].stopping
            engine.longest = longest if engine.longest or len(engines) > 1 else None
        folders = [stack.enter_context(RunFolder(out)) if out is not None else None for out in outs]
        caught = stack.enter_context(stop_on_signal(engines[0].stopping)) if any(folders) else []
        runs = [
            Run(config, engine, folder, resume, say, warn)
            for config, engine, folder, say in zip(configs, engines, folders, progress, strict=True)
        ]
        for each in runs:
            if each.folder and each.config.tensorboard:
                each.log = stack.enter_context(tensorboard(each.folder))
        return drive(runs, caught)


class Run:
    """A run under way: its state, its records, its folder."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        folder: RunFolder | None,
        resume: bool,
        progress: Progress,
        warn: Callable[[str], object],
    ) -> None:
        self.config, self.engine, self.folder = config, engine, folder
        self.progress = progress
        self.flat = config.flat()
        self.decisive = decisive(self.flat)
        self.state, self.before = engine.start(), 0.0
        self.log: SummaryWriter | None = None
        self.beside = 1  # runs stacked together
        self.records: list[RoundRecord] = []
        self.pending: tuple[Outcome, dict[str, Fetched]] | None = None  # a round whose record is not written yet
        if folder:
            found = checkpoint.load(folder.checkpoint, self.state, self.decisive, warn) if resume else None
            self.state, self.before = found or (self.state, 0.0)
            self.records = folder.truncate(self.state.round)
            folder.write_config(self.flat)
        self.started = self.saved = self.clock = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds, those before a resume included. Of runs stacked together, each has its share of the time."""
        return self.before + (time.perf_counter() - self.started) / self.beside

    def cohort(self, t: int) -> list[int]:
        """The clients of round t, counted from 0."""
        c = self.config
        return cohort(t, c.clients, c.participation, c.cohort, c.schedule_seed)

    def evaluate(self, outcome: Outcome) -> None:
        """After a round: start to evaluate what is due. The record follows when the figures are there."""
        self.pending = outcome, evaluate(self.config, self.engine, self.state)
        if self.engine.device.type == "cpu":
            self.record()

    def record(self) -> None:
        """Write the record of the round that was evaluated, if there is one; save; tell."""
        if self.pending is None:
            return
        (outcome, scores), self.pending = self.pending, None
        graded = {name: self.engine.grade(v.values()) for name, v in scores.items()}
        now = time.perf_counter()
        values = {
            "round": self.state.round,
            **vars(outcome),
            "accuracy": {name: accuracy for name, (accuracy, _) in graded.items()},
            "test_loss": {name: loss for name, (_, loss) in graded.items()},
            "seconds": round((now - self.clock) / self.beside, 4),
        }
        record = cast(RoundRecord, values)
        self.clock = now
        self.records.append(record)
        if self.folder:
            self.folder.append(record)
            if now - self.saved >= self.config.checkpoint_seconds and self.state.round < self.config.rounds:
                self.keep()
                self.saved = time.perf_counter()
        if self.log:
            log_round(self.log, record)
        self.progress(record)

    def keep(self) -> None:
        """Write a checkpoint."""
        if self.folder:
            self.folder.sync()
            checkpoint.save(self.folder.checkpoint, self.state, self.decisive, self.spent)

    def diverged(self, error: Diverged) -> None:
        """Note why there will be no summary."""
        if self.folder:
            about: Divergence = {
                "diverged": str(error),
                "round": self.state.round + 1,
                "config": self.flat,
                "version": version(),
            }
            self.folder.write_ending(about)

    def finish(self) -> Result:
        """The summary and the models, written and returned; the checkpoints have served."""
        last = self.records[-1]
        summary: Summary = {
            "method": self.config.method,
            "config": self.flat,
            "accuracy": last["accuracy"],
            "test_loss": last["test_loss"],
            "rounds_to_target": rounds_to_target(self.records, self.config.target),
            "seconds": round(self.spent, 3),
            "device": device_name(self.engine.device),
            "precision": self.engine.precision,
            "version": version(),
            "torch": torch.__version__,
        }
        if self.beside > 1:
            summary["stacked"] = self.beside
        models = {
            name: {k: v.cpu().clone() for k, v in self.engine.stacked.parameters(w).items()}
            for name, w in averages(self.engine, self.state).items()
        }
        if self.folder:
            self.folder.write_models(models)
            self.folder.write_ending(summary)
        return Result(summary, self.records, models)


def drive(runs: list[Run], caught: list[int]) -> list[Result | Diverged]:
    """Play all rounds of all runs; those at the same round are stacked."""
    ends: dict[int, Result | Diverged] = {}
    for run in runs:
        run.beside = len(runs)
    _rehearse(runs)
    while len(ends) < len(runs):
        t = min(run.state.round for i, run in enumerate(runs) if i not in ends)
        now = [i for i, run in enumerate(runs) if i not in ends and run.state.round == t]
        for i in [i for i in now if t >= runs[i].config.rounds]:
            runs[i].record()
            ends[i] = runs[i].finish()
            now.remove(i)
        if not now:
            continue
        try:
            flight = _launch([runs[i] for i in now])
        except Stopped:
            for i, run in enumerate(runs):
                if i not in ends:
                    run.record()
                    run.keep()
            where = " ".join(str(run.folder.path) for run in runs if run.folder)
            raise Interrupted(caught[0], f"round {t} is saved in {where}") from None
        for i in now:
            runs[i].record()
        for i, outcome in zip(now, flight.land(), strict=True):
            if isinstance(outcome, Diverged):
                runs[i].diverged(outcome)
                ends[i] = outcome
            else:
                runs[i].evaluate(outcome)
    return [ends[i] for i in range(len(runs))]


def _rehearse(runs: list[Run]) -> None:
    """On a GPU, the largest round to come first: the others then live in its memory."""
    left = range(min(run.state.round for run in runs), max(run.config.rounds for run in runs))
    if runs[0].engine.graphs is not None and left:
        t = max(left, key=lambda t: sum(len(run.cohort(t)) for run in runs))
        rehearse([(run.engine, run.state, run.cohort(t)) for run in runs])


def _launch(runs: list[Run]) -> Flight:
    """Start the next round of these runs, and on a GPU draw for the one after it."""
    flight = launch([(run.engine, run.state, run.cohort(run.state.round)) for run in runs])
    for run in runs:
        after = run.state.round + 1
        if run.engine.device.type == "cuda" and after < run.config.rounds:
            run.engine.draw_ahead(after, run.cohort(after))
    return flight


def finished_result(config: Config, out: str | Path) -> Result | None:
    """The result of a run that is done already; None if there is work left. `Diverged` where it ended so."""
    folder = RunFolder(out)
    ending = folder.finished(config.flat())
    if ending is None:
        return None
    if "diverged" in ending:
        raise Diverged(ending["diverged"])
    return Result(ending, folder.read_rounds(), folder.read_models())


def averages(engine: Engine, state: Federation) -> dict[str, Tensor]:
    """The models of a round: the mean of all clients, where it is kept, of the round's clients, the one sent next."""
    models = {"sel": state.sel, "cloud": state.server["w"]}
    return {"all": engine.everyone(state), **models} if engine.keeps_all else models


def evaluate(config: Config, engine: Engine, state: Federation) -> dict[str, Fetched]:
    """The scores, on their way to the host, of the models that are due after this round."""
    done, last = state.round, state.round == config.rounds
    scores: dict[str, Fetched] = {}
    for name, w in averages(engine, state).items():
        every = config.eval_every if name == "all" else config.eval_others_every
        if last or done % every == 0:
            same = name == "cloud" and "sel" in scores and w is state.sel
            scores[name] = scores["sel"] if same else Fetched(engine.scores(w))
    return scores


def rounds_to_target(records: list[RoundRecord], target: float | None) -> int | None:
    """The first round (counted from 1) in which `all` reaches the target; None if it never does."""
    if target is None:
        return None
    return next((r["round"] for r in records if r["accuracy"].get("all", -1) >= target), None)
