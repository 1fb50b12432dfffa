"""Runs grouped into series: one setting, several seeds; means, spreads and curves over the seeds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fedman.algorithms import ALGORITHMS
from fedman.config import resolve
from fedman.errors import UserError
from fedman.paper import targets as paper
from fedman.paper.presets import METHODS
from fedman.runs.records import LOCAL, ResultRow, axes

AXES = ("dataset", "partition", "algorithm", "zeta", "seed")
HOUSEKEEPING = (*LOCAL, "target", "eval_every", "eval_others_every", "chunk", "precision")
"""Keys that neither name a series nor make it a variant; precision is looked at apart."""


@dataclass(frozen=True)
class Curve:
    """Accuracy in percent over the rounds: mean, smallest and largest over the seeds."""

    rounds: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


Variant = tuple[tuple[str, Any], ...]
"""How a setting departs from the usual one: keys and their values."""


@dataclass(frozen=True, eq=False)
class Setting:
    """What a row of the paper's tables is about."""

    dataset: str
    partition: str
    algorithm: str
    zeta: float
    variant: Variant

    @property
    def man(self) -> bool:
        """Whether the MAN term is on."""
        return self.zeta > 0

    @property
    def method(self) -> str:
        """As the paper names it: FedDC, FedDC+MAN."""
        return method_title(self.algorithm, self.man)

    @property
    def departs(self) -> str:
        """The variant in words."""
        return in_words(self.variant)


@dataclass(frozen=True, eq=False)
class Series(Setting):
    """The runs of one setting, a seed each."""

    runs: list[ResultRow] = field(repr=False)

    @cached_property
    def accuracies(self) -> list[float]:
        """Of `all` in percent, seed by seed; nan where a run diverged."""
        return [math.nan if "diverged" in run else float(run["accuracy"]["all"]) for run in self.runs]

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
        return statistics.median(("diverged" not in run and run["rounds_to_target"]) or math.inf for run in self.runs)

    @property
    def seconds(self) -> float | None:
        """The mean time of a run."""
        spent = [run["seconds"] for run in self.runs if "diverged" not in run]
        return statistics.fmean(spent) if spent else None

    @cached_property
    def curve(self) -> Curve | None:
        """Over all seeds that came to their end, on the first one's rounds."""
        curves = [run["curve"] for run in self.runs if run["curve"]["round"] and "diverged" not in run]
        if not curves:
            return None
        rounds = np.array(curves[0]["round"], dtype=float)
        values = np.stack([np.interp(rounds, c["round"], c["all"]) for c in curves])
        return Curve(rounds, values.mean(0), values.min(0), values.max(0))


def in_words(variant: Variant) -> str:
    """As it would be typed: stale_ascent=true, zeta=0.3."""
    return ", ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in variant)


def method_title(algorithm: str, man: bool) -> str:
    """The name of an algorithm with or without MAN."""
    known = ALGORITHMS[algorithm].title if algorithm in ALGORITHMS else algorithm
    return f"{known}+MAN" if man else known


def method_order(algorithm: str) -> int:
    """The paper's order of rows."""
    names = [*METHODS, *(name for name in ALGORITHMS if name not in METHODS)]
    return names.index(algorithm) if algorithm in names else len(names)


def series(rows: Iterable[ResultRow]) -> list[Series]:
    """All series of these runs, in the paper's order.

    Runs that differ in precision alone make two series; the one with more seeds, or of the commoner precision, is the
    main one.
    """
    rows = list(rows)
    usual, common = _usual(rows), Counter(str(row.get("precision", "")) for row in rows)
    groups: dict[tuple[Any, ...], dict[str, dict[int, ResultRow]]] = {}
    for row in rows:
        config = row["config"]
        key = *(config[k] for k in ("dataset", "partition", "algorithm", "zeta")), _variant(config, usual(config))
        groups.setdefault(key, {}).setdefault(str(row.get("precision", "")), {}).setdefault(axes(row)["seed"], row)
    made = []
    for (dataset, partition, algorithm, zeta, variant), by_precision in groups.items():
        main = max(by_precision, key=lambda p: (len(by_precision[p]), common[p], p))
        for precision, by_seed in by_precision.items():
            extra = () if precision == main else (("precision", precision),)
            runs = [by_seed[seed] for seed in sorted(by_seed)]
            made.append(Series(dataset, partition, algorithm, float(zeta), (*variant, *extra), runs))
    return sorted(made, key=_order)


def _order(s: Series) -> tuple[Any, ...]:
    datasets, partitions = list(paper.TITLES), list(paper.PARTITIONS)
    return (
        datasets.index(s.dataset) if s.dataset in datasets else len(datasets),
        s.dataset,
        partitions.index(s.partition) if s.partition in partitions else len(partitions),
        s.partition,
        method_order(s.algorithm),
        s.zeta,
        s.departs,
    )


def _usual(rows: list[ResultRow]) -> Any:
    """The usual value of every key: the paper's for its data sets, else the most frequent one of the algorithm."""
    counts: dict[tuple[str, str], dict[str, Counter[str]]] = {}
    values: dict[str, Any] = {}
    for row in rows:
        config = row["config"]
        for key, value in config.items():
            text = repr(value)
            values[text] = value
            tally = counts.setdefault((axes(row)["dataset"], axes(row)["algorithm"]), {})
            tally.setdefault(key, Counter())[text] += 1
    known: dict[tuple[Any, ...], Mapping[str, Any]] = {}

    def usual(config: Mapping[str, Any]) -> Mapping[str, Any]:
        key = config["dataset"], config["partition"], config["algorithm"], config["zeta"] > 0
        if key not in known:
            tally = counts[config["dataset"], config["algorithm"]]
            most = {name: values[max(sorted(t), key=t.__getitem__)] for name, t in tally.items()}
            known[key] = {**most, **_papers(config)}
        return known[key]

    return usual


def _papers(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = {k: config[k] for k in ("partition", "algorithm", "zeta")}
    try:
        return resolve(keys, f"{config['dataset']}-dir0.3").flat() if paper.covers(config["dataset"]) else {}
    except UserError:
        return {}  # a results file of another version of the program


def papers_variant(config: Mapping[str, Any]) -> Variant:
    """How a run departs from the paper's setting; not at all where its data set is none of the paper's."""
    return _variant(config, _papers(config))


def _variant(config: Mapping[str, Any], usual: Mapping[str, Any]) -> Variant:
    apart = (*AXES, *HOUSEKEEPING)
    return tuple((k, v) for k, v in sorted(config.items()) if k not in apart and v != usual.get(k, v))
