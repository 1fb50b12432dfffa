"""A run under way: its state, its records and its folder, from the first round or a checkpoint to its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from fedman.config import Config
from fedman.errors import Diverged, StopRun, UserError, describe
from fedman.execution.device import device_name
from fedman.execution.transfer import Fetched
from fedman.runs import checkpoint
from fedman.runs.build import Built
from fedman.runs.folder import RunFolder
from fedman.runs.inputs import Inputs
from fedman.runs.records import (
    Computed,
    Divergence,
    Ending,
    Headline,
    Progress,
    RoundRecord,
    Source,
    Summary,
    evaluated_on,
    figures,
    headline_curve,
)
from fedman.runs.result import Result
from fedman.runs.version import source, version
from fedman.trackers import Tracker, open_trackers
from fedman.training.aggregate import Outcome
from fedman.training.evaluate import spread
from fedman.training.federation import Assignment, Federation
from fedman.training.round import Schedule
from fedman.training.state import RunState


class Scores(NamedTuple):
    """What models scored on the test set, on its way to the host."""

    models: dict[str, Fetched]
    own: Fetched | None  # of each sample, by the model of the client that holds it; None where they are not due


class Run:
    """A run under way: its state, its records, its folder, and in the end its result. `with` closes its trackers."""

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
        timer: checkpoint.Timer | None = None,
        until: int | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self.config, self.federation, self.state, self.built = config, federation, state, built
        self.inputs = inputs or {}
        self.timer = timer or checkpoint.Timer(config.checkpoint_seconds)
        self.folder, self.progress, self.warn, self.stacked = folder, progress, warn, len(built.federations)
        self.settings = config.flat()
        now: Computed = {
            "source": source(),
            "precision": built.precision,
        }  # a checkout can change while the run goes on
        self.computed = [now]
        self.headline = Headline.of(built.evaluator.task)
        self.schedule = Schedule(config.clients, config.participation, config.cohort, config.schedule_seed)
        self.before = 0.0  # seconds before a resume
        self.records: list[RoundRecord] = []
        self.pending: tuple[Outcome, Scores] | None = None  # a round whose record is not written yet
        self.end: Result | Diverged | None = None
        self.ending: Ending | None = None  # what the folder says of it
        self.extended_from: int | None = None  # `rounds` before it was raised, until the next record says so
        self.stopped: str | None = None  # why a callback or a tracker ended the run
        self.trackers: dict[str, Tracker] = {}
        if folder:
            self._open(folder, resume, warn, until)
        self.started = self.clock = time.perf_counter()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for name, tracker in self.trackers.items():
            try:
                tracker.close(self.ending)
            except Exception as error:  # its package may raise anything; the run's own files are complete
                self.warn(f"log: {name} failed to close ({describe(error)})")

    def _open(self, folder: RunFolder, resume: bool, warn: Callable[[str], object], until: int | None) -> None:
        """Begin to write to the folder, which is locked by now: what others did to it before is known. A run that
        resumes does so at round `until` at the latest, where it is given."""
        last = None
        if not resume:
            folder.refuse_used()
        elif folder.finished(self.settings, go_on=True) is not None:
            raise UserError(f"{folder.path}: another process has just finished this run; repeat the command")
        elif found := checkpoint.restore(folder.checkpoint, self.state, self.settings, warn, until, self.inputs):
            if not folder.is_checked:
                warn(f"{folder.path}: written by an earlier version, without checksums; its records are not checked")
            elif "records" not in found:
                warn(f"{folder.path}: an earlier version's checkpoint; whether the records belong to it is not checked")
            last = found.get("records")
            unknown: Source = {"unknown": f"fedman {found['version']} did not say"}
            by_earlier: Computed = {"source": unknown, "precision": self.computed[0]["precision"]}
            self._go_on(found.get("computed", [] if found["version"] == version() else [by_earlier]), folder)
            self.before, rounds = found["seconds"], int(found["config"]["rounds"])
            self.extended_from = rounds if rounds < self.config.rounds else None
        self.trackers = open_trackers(self.config.log, folder.path, self.settings, self.state.round)
        try:
            self.records = folder.start(self.state.round, self.settings, last)
        except BaseException:
            self.__exit__()
            raise

    def _go_on(self, before: list[Computed], folder: RunFolder) -> None:
        """Rounds have been computed, perhaps by other code or in another precision."""
        (now,) = self.computed
        self.computed = [*(each for each in before if each != now), now]
        if other := {each["precision"] for each in before} - {now["precision"]}:
            was, here = ", ".join(sorted(other)), f"precision={self.config.precision} on this device"
            self.warn(f"{folder.path}: was computed in {was} and goes on in {now['precision']}, which is {here}")

    @property
    def _origin(self) -> dict[str, Any]:
        """What an ending says of the code, the precision and what is the user's own."""
        sources = [each["source"] for each in self.computed]
        earlier = [each for i, each in enumerate(sources) if each not in sources[i + 1 :]][:-1]
        return {
            "precision": ", ".join(dict.fromkeys(each["precision"] for each in self.computed)),
            "version": version(),
            "source": sources[-1],
            **({"earlier_sources": earlier} if earlier else {}),
            **({"inputs": self.inputs} if self.inputs else {}),
        }

    @property
    def done(self) -> bool:
        """Whether no round is left."""
        return self.state.round >= self.config.rounds or self.stopped is not None

    @property
    def _saves_last(self) -> bool:
        """Whether a checkpoint follows the last round: in a stack, before one of it ends, so that after a kill between
        two ends none is played alone. Not on a GPU, where models are large and their clients' rows gigabytes."""
        return self.stacked > 1 and self.federation.device.type == "cpu"

    @property
    def spent(self) -> float:
        """Seconds, those before a resume included. Of runs stacked together, each has its share of the time."""
        return self.before + (time.perf_counter() - self.started) / self.stacked

    def plan(self, t: int) -> Assignment:
        """Round t, counted from 0, from the present state."""
        return Assignment(self.federation, self.state, self.schedule.round(t, self.federation.training))

    def evaluate(self, outcome: Outcome) -> None:
        """After a round: start to evaluate what is due. The record follows when the figures are there."""
        self.pending = outcome, self._scores(last=self.state.round == self.config.rounds)

    def _scores(self, last: bool) -> Scores:
        """The scores of the models that are due, which are all after the last round."""
        done, models = self.state.round, self.federation.models(self.state)
        scores: dict[str, Fetched] = {}
        others = last or done % self.config.eval_others_every == 0
        for name, w in models.items():
            if last or done % self.config.eval_every == 0 if name == "all" else others:
                same = name == "cloud" and "sel" in scores and w is models["sel"]
                each = name == next(iter(models)) and others and self.built.evaluator.parts is not None
                scores[name] = scores["sel"] if same else Fetched(self.built.evaluator.scores(w, each))
        if not others or self.built.evaluator.parts is None:
            return Scores(scores, None)
        first, model = next(iter(models.items()))
        if self.federation.own is None:
            return Scores(scores, scores.get(first))
        own = partial(self.federation.personal_model, self.state, model)
        return Scores(scores, Fetched(self.built.evaluator.personal_scores(own)))

    def _figures(self, scores: Scores, last: bool) -> dict[str, Any]:
        """The figures of the task, the test loss and what the clients' own test sets say."""
        evaluator = self.built.evaluator
        graded = {name: evaluator.grade(v.values()) for name, v in scores.models.items()}
        names = list(next(iter(graded.values()))[0]) if graded else [self.headline.name]
        names.sort(key=lambda name: name != self.headline.name)
        values: dict[str, Any] = {
            **{figure: {name: found[figure] for name, (found, _) in graded.items()} for figure in names},
            "test_loss": {name: loss for name, (_, loss) in graded.items()},
        }
        if scores.own is not None and (each := evaluator.by_client(scores.own.values())):
            values["clients"] = spread(each, evaluator.task.higher_is_better) | ({"each": each} if last else {})
        return values

    def record(self) -> None:
        """Write the record of the round that was evaluated, if there is one; save; tell."""
        if self.pending is None:
            return
        (outcome, scores), self.pending = self.pending, None
        measured = self._figures(scores, last=self.state.round == self.config.rounds)
        own, now = measured.pop("clients", None), time.perf_counter()
        values = {
            "round": self.state.round,
            **{name: v for name, v in vars(outcome).items() if name != "transfers" and v is not None},
            **(vars(outcome.transfers) if outcome.transfers else {}),
            **measured,
            "seconds": round((now - self.clock) / self.stacked, 4),
            **({"clients": own} if own else {}),
        }
        record = cast(RoundRecord, values)
        if self.extended_from is not None:
            record["extended_from"], self.extended_from = self.extended_from, None
        self.clock = now
        self.records.append(record)
        if self.folder:
            self.folder.append(record)
            is_last = self.state.round == self.config.rounds
            due = self._saves_last if is_last else self.timer.is_due(self.state.round)
            if due:
                self.save_checkpoint()
                self.timer.restart()
        self._tell(record)

    def _tell(self, record: RoundRecord) -> None:
        """Show a record to the trackers and to `progress`, a copy to each; each of them may stop the run."""
        for name, tracker in list(self.trackers.items()):
            try:
                with self._stoppable():
                    tracker.log(deepcopy(record))
            except Exception as error:  # its package may raise anything; the run's own files are complete
                self.warn(f"log: {name} failed in round {record['round']} and is left out from now ({describe(error)})")
                del self.trackers[name]
        with self._stoppable():
            self.progress(deepcopy(record))

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Note why the run is to stop, unless it was its last round anyway."""
        try:
            yield
        except StopRun as stop:
            if self.state.round < self.config.rounds:
                self.stopped = str(stop) or "no reason given"

    def save_checkpoint(self) -> None:
        """Write a checkpoint."""
        if self.folder:
            last = self.folder.sync()
            made = self.settings, self.spent, last, self.computed, self.inputs
            checkpoint.save(self.folder.checkpoint, self.state, *made)

    def diverge(self, error: Diverged) -> None:
        """Note why there will be no summary."""
        self.end = error
        about = {"diverged": str(error), "round": self.state.round + 1, "config": self.settings, **self._origin}
        self.ending = cast(Divergence, about)
        if self.folder:
            self.folder.write_ending(self.ending)
            checkpoint.prune(self.folder.checkpoint, keep=int(self.config.keep_state))

    def finish(self) -> None:
        """Write the summary and the models; of the checkpoints the last at most is kept."""
        last: Any = self._figures(self._scores(last=True), last=True) if self.stopped else self.records[-1]
        values = {
            "method": self.config.method,
            "config": self.settings,
            **figures(last),
            "test_loss": last["test_loss"],
            "rounds_to_target": rounds_to_target(self.records, self.config.target, self.headline),
            "seconds": round(self.spent, 3),
            "device": device_name(self.federation.device),
            "execution": self.built.executor.execution.title,
            "torch": torch.__version__,
            **self._origin,
        }
        self.ending = summary = cast(Summary, values)
        if self.config.validation:
            summary["evaluated_on"] = evaluated_on(self.settings)
        if self.stopped:
            summary["stopped"], summary["round"] = self.stopped, self.state.round
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


def rounds_to_target(records: list[RoundRecord], target: float | None, headline: Headline) -> int | None:
    """The first round (counted from 1) in which `all` reaches the target, or `cloud` where `all` is not kept; None if
    it never does."""
    if target is None:
        return None
    curve = headline_curve(records, headline.name)
    return next((t for t, value in curve if headline.reaches(value, target)), None)
