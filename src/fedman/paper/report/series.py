"""Runs grouped into series: the seeds of one setting, with their mean, spread and mean curve."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fedman.algorithms import ALGORITHMS
from fedman.config import resolve
from fedman.errors import UserError
from fedman.paper import targets as paper
from fedman.paper.presets import METHODS, PRESETS
from fedman.runs.checksums import sha256
from fedman.runs.records import LOCAL, ResultRow, Settings, axes

AXES = ("dataset", "partition", "algorithm", "zeta", "seed")
HOUSEKEEPING = (*LOCAL, "target", "eval_every", "eval_others_every", "chunk", "precision")
"""Keys that neither name a series nor make it a variant; `series` looks at the precision itself."""
SLUG_BYTES = 60  # three of them and a few words are the name of a file


@dataclass(frozen=True)
class Curve:
    """Accuracy in percent over the rounds: mean, smallest and largest over the seeds."""

    rounds: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Setting:
    """What a row of the paper's tables is about."""

    dataset: str
    partition: str
    algorithm: str
    zeta: float
    variant: str  # the keys whose values are not the usual ones: "rho=0.1, stale_ascent=true"

    @property
    def man(self) -> bool:
        """Whether the MAN term is on."""
        return self.zeta > 0

    @property
    def method(self) -> str:
        """As the paper names it: FedDC, FedDC+MAN."""
        return method_title(self.algorithm, self.man)


@dataclass(frozen=True)
class Series(Setting):
    """The runs of one setting, one for each seed."""

    runs: list[ResultRow] = field(repr=False, compare=False)

    @cached_property
    def accuracies(self) -> list[float]:
        """The accuracy of `all` in percent for each seed; nan where a run diverged."""
        return [math.nan if "diverged" in run else run["accuracy"]["all"] for run in self.runs]

    @property
    def mean(self) -> float:
        """nan if any seed diverged."""
        return statistics.fmean(self.accuracies)

    @property
    def std(self) -> float | None:
        """The sample standard deviation (n − 1); None for one seed, or where one diverged."""
        several = len(self.accuracies) > 1 and not math.isnan(self.mean)
        return statistics.stdev(self.accuracies) if several else None

    @property
    def target(self) -> float | None:
        """The accuracy for rounds-to-target, in percent."""
        return axes(self.runs[0]).get("target")

    @property
    def length(self) -> int:
        """T, the number of rounds."""
        return axes(self.runs[0])["rounds"]

    @property
    def rounds_to_target(self) -> float:
        """The median over seeds of the first round at the target; inf where most seeds never get there."""
        return statistics.median(first_at_target(run) or math.inf for run in self.runs)

    @cached_property
    def curve(self) -> Curve | None:
        """Over all seeds that came to their end, on the first one's rounds."""
        curves = [run["curve"] for run in self.runs if run["curve"]["round"] and "diverged" not in run]
        if not curves:
            return None
        rounds = np.array(curves[0]["round"], dtype=float)
        values = np.stack([np.interp(rounds, c["round"], c["all"]) for c in curves])
        return Curve(rounds, values.mean(0), values.min(0), values.max(0))


def first_at_target(run: ResultRow) -> int | None:
    """The first round of a run that reaches the target accuracy."""
    return None if "diverged" in run else run["rounds_to_target"]


def method_title(algorithm: str, man: bool) -> str:
    """The name of an algorithm with or without MAN."""
    known = ALGORITHMS[algorithm].title if algorithm in ALGORITHMS else algorithm
    return f"{known}+MAN" if man else known


def method_order(algorithm: str) -> int:
    """The paper's order of rows."""
    return _position([*METHODS, *(name for name in ALGORITHMS if name not in METHODS)], algorithm)


def slug(name: str) -> str:
    """A name that is safe in a file's name, in an attribute and in a style, and not too long for any."""
    safe = "".join(c if c.isalnum() or c in "-." else "-" for c in name).strip("-.") or "data"
    if len(safe.encode()) <= SLUG_BYTES:
        return safe
    return f"{safe.encode()[: SLUG_BYTES - 9].decode(errors='ignore')}-{sha256(safe.encode())[:8]}"


def series(rows: Sequence[ResultRow]) -> list[Series]:
    """All series of these runs, in the paper's order.

    Usual values are the paper's for its data sets, else the most frequent ones of the data set and algorithm. Runs that
    differ in precision alone make two series; the one with more seeds, or of the more frequent precision, is the main
    one, and has the runs that diverged, whose precision is not recorded.
    """
    configs: dict[tuple[str, str], list[Settings]] = {}
    for row in rows:
        configs.setdefault((axes(row)["dataset"], axes(row)["algorithm"]), []).append(row["config"])
    usual = {key: _most_frequent(members) for key, members in configs.items()}
    frequency = Counter(map(_precision, rows))
    groups: dict[Setting, dict[str, dict[int, ResultRow]]] = {}
    for row in rows:
        a = axes(row)
        changes = _changes(row["config"], usual[a["dataset"], a["algorithm"]] | _papers(row["config"]))
        setting = Setting(a["dataset"], a["partition"], a["algorithm"], a["zeta"], changes)
        groups.setdefault(setting, {}).setdefault(_precision(row), {}).setdefault(a["seed"], row)
    made = []
    for setting, by_precision in groups.items():
        unknown = by_precision.pop("", {})
        main = max(by_precision, key=lambda p: (len(by_precision[p]), frequency[p], p), default="")
        by_precision[main] = unknown | by_precision.get(main, {})
        for precision, by_seed in by_precision.items():
            other = "" if precision == main else f"precision={precision}"
            variant = ", ".join(filter(None, (setting.variant, other)))
            runs = [by_seed[seed] for seed in sorted(by_seed)]
            made.append(Series(**(vars(setting) | {"variant": variant}), runs=runs))
    return sorted(made, key=_order)


def papers_variant(config: Settings) -> str:
    """The variant of a run against the paper's setting; none where its data set is not one of the paper's."""
    return _changes(config, _papers(config))


def _order(s: Series) -> tuple[object, ...]:
    place = (_position(paper.TITLES, s.dataset), s.dataset, _position(paper.PARTITIONS, s.partition), s.partition)
    return *place, method_order(s.algorithm), s.zeta, s.variant


def _position(names: Iterable[str], name: str) -> int:
    """Unknown names come last."""
    known = list(names)
    return known.index(name) if name in known else len(known)


def _precision(row: ResultRow) -> str:
    return "" if "diverged" in row else row["precision"]


def _most_frequent(configs: Sequence[Settings]) -> Settings:
    """The most frequent value of each key."""
    found: Settings = {}
    for key in {key for config in configs for key in config}:
        values = {repr(config[key]): config[key] for config in configs if key in config}
        found[key] = values[statistics.mode(sorted(repr(config[key]) for config in configs if key in config))]
    return found


def _papers(config: Settings) -> Settings:
    """The paper's setting for a run's data, algorithm and ζ; empty where it has none."""
    keys: Settings = {k: config[k] for k in ("partition", "algorithm", "zeta") if k in config}
    try:
        name = str(config.get("dataset"))
        return resolve(keys, PRESETS[f"{name}-dir0.3"]).flat() if name in paper.TABLES else {}
    except UserError:
        return {}  # a results file of another version of the program


def _changes(config: Settings, usual: Settings) -> str:
    """The keys with other values than the usual ones, as they would be typed."""
    apart = (*AXES, *HOUSEKEEPING)
    changed = {k: v for k, v in sorted(config.items()) if k not in apart and v != usual.get(k, v)}
    return ", ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in changed.items())
