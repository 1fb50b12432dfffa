"""Choose settings: a sweep whose runs are scored on a validation part of the training samples, never on the test set.

With rungs the worse settings stop early (successive halving): after each rung's round the better half goes on from its
checkpoints, so that no round is played twice. What is played next and what is chosen are functions of the runs'
folders: a tuning that was killed goes on where it stopped, and ends as it would have.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

from fedman.config import HELD_OUT, Preset
from fedman.errors import UserError
from fedman.runs import records
from fedman.runs.atomic import write_json, write_toml, writing
from fedman.runs.checkpoint import prune
from fedman.runs.folder import RunFolder, locked
from fedman.runs.grid import Cell, Grid, Sweep
from fedman.runs.records import Headline, Settings, check, decisive, differing, figure, parse
from fedman.runs.sweep import Table
from fedman.tasks import TASKS

NAME, FORMAT = "tune.json", 1
UNKNOWN = "–"
ELSEWHERE = "choose another --out"


class Tried(TypedDict):
    """A setting that was tried."""

    varied: Settings  # the keys of the grid, without the seed
    config: Settings  # of its first run
    seeds: list[int]
    scores: dict[str, float | None]  # by rung: the headline on the validation part, mean over seeds; None: diverged
    seconds: NotRequired[float]  # of all its runs
    chosen: bool


class Tuning(TypedDict):
    """`tune.json`."""

    format: int
    headline: str
    lower_is_better: bool
    each: list[str]  # one setting is chosen for every combination of their values
    rungs: list[int]
    settings: list[Tried]


@dataclass(frozen=True)
class Setting:
    """Runs that differ in nothing but their seed: what is scored."""

    cells: tuple[Cell, ...]

    @property
    def varied(self) -> Settings:
        first = self.cells[0]
        return {key: getattr(first.config, key) for key in first.varied if key != "seed"}


@dataclass(frozen=True)
class Plan:
    """What is tuned: groups of settings, from each of which one is chosen."""

    groups: tuple[tuple[Setting, ...], ...]
    each: tuple[str, ...]
    rungs: tuple[int, ...]  # the last is the number of rounds
    headline: Headline

    @property
    def batches(self) -> list[list[tuple[Setting, ...]]]:
        """Groups that are played together. A state to go on from is large, so that, where every algorithm has a choice
        of its own, one algorithm is done before the next begins."""
        if "algorithm" not in self.each:
            return [list(self.groups)]
        found: dict[str, list[tuple[Setting, ...]]] = {}
        for group in self.groups:
            found.setdefault(group[0].cells[0].config.algorithm, []).append(group)
        return list(found.values())


def plan(grid: Sequence[Cell], each: Sequence[str], rungs: Sequence[int]) -> Plan:
    """The plan of a tuning over a grid, checked. One setting is chosen for every combination of values of `each`."""
    configs, varied = [cell.config for cell in grid], dict.fromkeys(key for cell in grid for key in cell.varied)
    headlines = {Headline.of(TASKS[config.task]) for config in configs}
    rounds, given = {config.rounds for config in configs}, ",".join(map(str, rungs))
    if not all(config.validation for config in configs):
        raise UserError(f"validation: 0 leaves nothing to choose by; give a share, as validation={HELD_OUT}")
    if unknown := [key for key in each if key not in varied]:
        raise UserError(f"each: {unknown[0]!r} has not several values; {', '.join(varied) or 'no key'} has")
    if len(headlines) > 1:
        raise UserError(f"task: {' and '.join(sorted(h.name for h in headlines))} cannot be compared with each other")
    if len(rounds) > 1:
        raise UserError("rounds: runs of different lengths cannot be compared; --rungs ends the worse ones early")
    if list(rungs) != sorted({*rungs}) or not all(0 < rung < min(rounds) for rung in rungs):
        raise UserError(f"rungs: {given!r} are not ascending rounds between 0 and the {min(rounds)} of a run")
    if rungs and any(config.lr_schedule == "cosine" for config in configs):
        raise UserError("rungs: a run with lr_schedule=cosine cannot go on from a shorter one; leave out --rungs")
    settings: dict[str, list[Cell]] = {}
    for cell in grid:
        settings.setdefault(replace(cell, varied={**cell.varied, "seed": 0}).name, []).append(cell)
    groups: dict[tuple[object, ...], list[Setting]] = {}
    for cells in settings.values():
        setting = Setting(tuple(cells))
        groups.setdefault(_values(setting.varied, each), []).append(setting)
    for values, members in groups.items():
        if len(members) < 2:
            of = "".join(f" {key}={value}" for key, value in zip(each, values, strict=True))
            raise UserError(f"tune: one setting alone{of and f' has{of}'}; give a key several values, as lr=0.03,0.1")
    made = tuple(tuple(members) for members in groups.values())
    return Plan(made, tuple(each), (*rungs, *rounds), headlines.pop())


@dataclass(frozen=True)
class Played:
    """What there is of a run."""

    values: Sequence[float | None]  # the headline of `all` after each round, where it was evaluated
    length: int  # the rounds it was to have
    diverged: bool
    seconds: float

    def score(self, rung: int) -> float | None:
        """The value after a rung; nan where the run diverged before it, None where it has not come so far."""
        if len(self.values) < rung:
            return math.nan if self.diverged else None
        return self.values[rung - 1]


def played(cell: Cell, out: Path, plan: Plan) -> Played:
    """Read the folder of a run, which may be shorter than it is to become. One that is longer, of another configuration
    or not evaluated after a rung is refused."""
    folder = RunFolder(out / cell.name)
    if not folder.config.exists():
        return Played((), 0, False, 0.0)
    before, now = decisive(folder.read_config()), decisive(cell.config.flat())
    if changed := [key for key in differing(before, now) if key != "rounds"]:
        raise UserError(f"{folder.path}: holds a run of another configuration; {', '.join(changed)} differ")
    if int(before["rounds"]) > plan.rungs[-1]:
        raise UserError(f"{folder.path}: holds a run of {before['rounds']} rounds, not {plan.rungs[-1]}; {ELSEWHERE}")
    rounds = folder.read_rounds()
    if len(rounds) == before["rounds"] and folder.ending() is None:
        rounds.pop()  # of a process killed before it had written the end
    values = [figure(record, plan.headline.name).get("all") for record in rounds]
    for rung in plan.rungs:
        if rung <= len(values) and values[rung - 1] is None:
            raise UserError(f"{folder.path}: was not evaluated after round {rung}; {ELSEWHERE}")
    seconds = math.fsum(record["seconds"] for record in rounds)
    return Played(values, int(before["rounds"]), folder.diverged.exists(), seconds)


@dataclass(frozen=True)
class Progress:
    """How far a group has come: the scores of its settings by rung, and the settings that are still in the race."""

    scores: list[dict[int, float]]  # nan: diverged
    left: list[int]  # the numbers of the settings that come to the next rung, or came to the last
    next: int | None  # the rung that some of them have not come to; None when the best is known

    @property
    def best(self) -> int | None:
        """The number of the setting chosen; None before the end, or where all diverged."""
        return self.left[0] if self.next is None and self.left else None


def progress(group: Sequence[Setting], plan: Plan, runs: Mapping[str, Played]) -> Progress:
    """Successive halving as far as the runs have come: after each rung the better half, rounded up, is left."""
    scores: list[dict[int, float]] = [{} for _ in group]
    left = list(range(len(group)))
    for rung in plan.rungs:
        for i in left:
            found = [runs[cell.name].score(rung) for cell in group[i].cells]
            if None not in found:
                scores[i][rung] = statistics.fmean(value for value in found if value is not None)
        if not all(rung in scores[i] for i in left):
            return Progress(scores, left, rung)
        alive = [i for i in left if not math.isnan(scores[i][rung])]
        alive.sort(key=lambda i: -plan.headline.gain(0.0, scores[i][rung]))  # stable: of equal ones the grid's first
        left = alive[: -(-len(left) // 2)]
    return Progress(scores, left, None)


def next_runs(batch: Sequence[Sequence[Setting]], plan: Plan, out: Path) -> list[Cell]:
    """The runs to play next, as long as they are to be now; none when all is known. What goes on keeps its state, and
    the states of those that go no further are deleted."""
    cells = [cell for group in batch for setting in group for cell in setting.cells]
    runs = {cell.name: played(cell, out, plan) for cell in cells}
    known = [progress(group, plan, runs) for group in batch]
    rung = min((each.next for each in known if each.next is not None), default=None)
    work = []
    for group, each in zip(batch, known, strict=True):
        for i, setting in enumerate(group):
            for cell in setting.cells:
                if i not in each.left or each.next is None:
                    prune(RunFolder(out / cell.name).checkpoint, 0)
                elif each.next == rung and runs[cell.name].score(rung) is None:
                    length = max(rung, runs[cell.name].length)
                    more = {"rounds": length, "keep_state": length < plan.rungs[-1]}
                    work.append(replace(cell, config=cell.config.model_copy(update=more)))
    return work


def known(plan: Plan, out: Path) -> Tuning:
    """What a folder knows of a tuning: its settings as far as their runs have come, and what was tried in other parts
    of it, of other algorithms for example. A folder with another tuning is refused."""
    found: Tuning = {
        "format": FORMAT,
        "headline": plan.headline.name,
        "lower_is_better": plan.headline.lower_is_better,
        "each": list(plan.each),
        "rungs": list(plan.rungs),
        "settings": _tried(plan, out),
    }
    if not (out / NAME).exists():
        return found
    before, mine = read(out / NAME), {_values(tried["varied"], plan.each) for tried in found["settings"]}
    if changed := [key for key in ("headline", "each", "rungs") if before[key] != found[key]]:
        raise UserError(f"{out / NAME}: of a tuning with other {' and '.join(changed)}; {ELSEWHERE}")
    others = [tried for tried in before["settings"] if _values(tried["varied"], plan.each) not in mine]
    return {**found, "settings": [*others, *found["settings"]]}


def _tried(plan: Plan, out: Path) -> list[Tried]:
    """The settings of a plan, as far as their runs have come."""
    found = list[Tried]()
    for group in plan.groups:
        runs = {cell.name: played(cell, out, plan) for setting in group for cell in setting.cells}
        now = progress(group, plan, runs)
        for i, setting in enumerate(group):
            found.append(
                {
                    "varied": setting.varied,
                    "config": decisive(setting.cells[0].config.flat()),
                    "seeds": [cell.config.seed for cell in setting.cells],
                    "scores": {str(k): None if math.isnan(v) else v for k, v in now.scores[i].items()},
                    "seconds": round(math.fsum(runs[cell.name].seconds for cell in setting.cells), 3),
                    "chosen": i == now.best,
                }
            )
    return found


def write(plan: Plan, out: Path) -> Tuning:
    """Write what is known to `tune.json`, and every choice that is made as a TOML file for `fedman run`. Several
    processes may play parts of a tuning in one folder."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        found = known(plan, out)
        write_json(out / NAME, found)
        for choice in found["settings"]:
            if choice["chosen"]:
                write_toml(out / file_of(choice, found), run_settings(choice))
    return found


def read(path: Path) -> Tuning:
    """A `tune.json`."""
    value = parse(records.content(path), str(path))
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UserError(f"{path}: not a tuning in format {FORMAT}")
    return check(Tuning, value, str(path))


def choices(found: Tuning, where: Path) -> list[Tried]:
    """The settings that were chosen."""
    chosen = [tried for tried in found["settings"] if tried["chosen"]]
    if found["settings"] and all(None in tried["scores"].values() for tried in found["settings"]):
        raise UserError(f"{where}: no setting could be chosen; all of them diverged")
    if not chosen:
        raise UserError(f"{where}: no setting is chosen yet; repeat the fedman tune command to go on")
    return chosen


def find(path: Path) -> list[Path]:
    """A file, or all in a folder and below that are called `tune.json` or NAME-tune.json."""
    found = sorted(path.rglob(f"*{NAME}")) if path.is_dir() else [path]
    if not found:
        raise UserError(f"{path}: no {NAME} here")
    return found


def missing(found: Tuning) -> str:
    """For which values of `each` no setting is chosen, and why: "fedavg 0.15 (diverged), feddyn 0.0"."""
    groups: dict[tuple[object, ...], list[Tried]] = {}
    for tried in found["settings"]:
        groups.setdefault(_values(tried["varied"], found["each"]), []).append(tried)
    told = []
    for values, members in groups.items():
        if not any(tried["chosen"] for tried in members):
            lost = all(None in tried["scores"].values() for tried in members)
            told.append(" ".join([*map(_text, values), *(["(diverged)"] if lost else [])]))
    return ", ".join(told)


def chosen_sweep(path: Path, warn: Callable[[str], object] = lambda message: None) -> Sweep:
    """The chosen settings of tunings as a sweep: on all training samples, evaluated on the test set."""
    grids, chosen, tuned = [], list[Tried](), set[str]()
    for file in find(path):
        found = read(file)
        chosen += choices(found, file)
        tuned |= {key for tried in found["settings"] for key in tried["varied"]} - {*found["each"]}
        if without := missing(found):
            warn(f"{file}: nothing is chosen for {without}; repeat the fedman tune command to go on with a tuning")
    for choice in chosen:
        axes = {key: (_text(value),) for key, value in choice["varied"].items()}
        kept = {key: value for key, value in run_settings(choice).items() if key not in axes}
        grids.append(Grid(Preset(kept), {**axes, "seed": tuple(map(str, choice["seeds"]))}))
    return Sweep(str(path), tuple(grids), frozenset(tuned))


def run_settings(choice: Tried) -> Settings:
    """The keys of a run with a chosen setting on all training samples, evaluated as often as any other run."""
    own = ("validation", "eval_every", "eval_others_every")
    return {key: value for key, value in choice["config"].items() if key not in own}


def file_of(choice: Tried, found: Tuning) -> str:
    """The name of the TOML file of a choice: best.toml, best-feddyn-0.15.toml."""
    words = ["best", *map(_text, _values(choice["varied"], found["each"]))]
    return "-".join(words).replace("/", "_").replace(":", "_") + ".toml"


def table(found: Tuning) -> Table:
    """Every setting that was tried: those of one choice together, the best first."""
    compared = Headline(found["headline"], found["lower_is_better"])
    keys = list(dict.fromkeys(key for tried in found["settings"] for key in tried["varied"]))
    places = list(dict.fromkeys(_values(tried["varied"], found["each"]) for tried in found["settings"]))

    def place(tried: Tried) -> tuple[float, ...]:
        rung, value = next(reversed(tried["scores"].items()), ("0", None))
        last = math.inf if value is None else -compared.gain(0.0, value)
        return places.index(_values(tried["varied"], found["each"])), -int(rung), last

    rows = []
    for tried in sorted(found["settings"], key=place):
        row = [_text(tried["varied"].get(key, UNKNOWN)) for key in keys]
        for rung in map(str, found["rungs"]):
            value = tried["scores"].get(rung)
            text = "diverged" if value is None else f"{value:{compared.form(value)}}"
            row.append(text if rung in tried["scores"] else UNKNOWN)
        rows.append([*row, f"{tried.get('seconds', 0.0):.1f}", "●" if tried["chosen"] else ""])
    header = [*keys, *(f"round {rung}" for rung in found["rungs"]), "s", "chosen"]
    return Table(compared.title(" of the mean of all clients", "validation"), header, rows)


def _values(varied: Settings, keys: Sequence[str]) -> tuple[object, ...]:
    return tuple(varied.get(key) for key in keys)


def _text(value: object) -> str:
    """A value as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)
