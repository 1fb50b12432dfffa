"""Runs grouped into series: the seeds of one setting, with their mean, spread and mean curve."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fedman.algorithms import ALGORITHMS
from fedman.config import PARTS, UNSAID, resolve
from fedman.errors import UserError
from fedman.paper import targets as paper
from fedman.paper.presets import METHODS, PRESETS
from fedman.penalties import PENALTIES
from fedman.runs.checksums import sha256
from fedman.runs.records import (
    LOCAL,
    Headline,
    ResultRow,
    Settings,
    Spread,
    axes,
    differing,
    figure,
    headline,
    headline_of,
    is_explained,
)
from fedman.runs.text_tables import mean_std

MAN = "man"  # the paper's penalty
AXES = ("dataset", "partition", "algorithm", "penalty", "zeta", "seed")
HOUSEKEEPING = (*LOCAL, "target", "eval_every", "eval_others_every", "chunk", "precision", "execution", "deterministic")
"""Keys that neither name a series nor make it a variant; `series` looks at the precision itself."""
UNEXPLAINED = "†"
SLUG_BYTES = 60  # three of them and a few words are the name of a file


@dataclass(frozen=True)
class Curve:
    """The headline over the rounds: mean, smallest and largest over the seeds."""

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
    penalty: str  # what ζ weighs; "" where ζ = 0
    zeta: float
    variant: str  # the keys whose values are not the usual ones: "rho=0.1, stale_ascent=true"

    @property
    def method(self) -> str:
        """As the paper names it: FedDC, FedDC+MAN."""
        return method_title(self.algorithm, self.penalty)

    @property
    def place(self) -> str:
        """The data and the partition in words."""
        return f"{paper.title(self.dataset)}, {paper.partition_title(self.partition)}"

    @property
    def place_slug(self) -> str:
        """The same for files."""
        return f"{slug(self.dataset)}-{slug(self.partition)}"

    @property
    def papers_method(self) -> bool:
        """Whether it is plain or has the paper's penalty."""
        return self.penalty in ("", MAN)


@dataclass(frozen=True)
class Series(Setting):
    """The runs of one setting, one for each seed."""

    headline: Headline
    runs: list[ResultRow] = field(repr=False, compare=False)
    model: str = ""  # where it is not the usual one of the data set

    @property
    def changed(self) -> str:
        """All that is not usual: the model and the variant."""
        return ", ".join(filter(None, (f"model={self.model}" if self.model else "", self.variant)))

    @cached_property
    def values(self) -> list[float]:
        """The headline of `all` for each seed; nan where a run diverged."""
        return list(map(headline, self.runs))

    @property
    def seeds(self) -> list[int]:
        return [axes(run)["seed"] for run in self.runs]

    @property
    def mean(self) -> float:
        """nan if any seed diverged."""
        return statistics.fmean(self.values)

    def over(self, seeds: Collection[int]) -> float:
        """The mean over some of its seeds."""
        return statistics.fmean(value for seed, value in zip(self.seeds, self.values, strict=True) if seed in seeds)

    @property
    def std(self) -> float | None:
        """The sample standard deviation (n − 1); None for one seed, or where one diverged."""
        several = len(self.values) > 1 and not math.isnan(self.mean)
        return statistics.stdev(self.values) if several else None

    @property
    def text(self) -> str:
        """Mean ± standard deviation."""
        return mean_std(self.values, self.headline.form(self.mean))

    @property
    def mark(self) -> str:
        """† if a run's code is in no commit and no release."""
        return "" if all(map(is_explained, self.runs)) else UNEXPLAINED

    def figure_text(self, name: str) -> str:
        """Mean ± standard deviation of another figure of the task, over the seeds that have it."""
        found = [value for run in self.runs if (value := figure(run, name).get("all")) is not None]
        return mean_std(found, Headline(name).form(*found))

    def part(self, kind: str) -> str:
        """The name of one of its parts, such as the attack."""
        return str(said(self.runs[0]["config"])[kind])

    @property
    def clients(self) -> list[Spread]:
        """The headline on the clients' own test samples, for each seed that has it."""
        found = [run["clients"] for run in self.runs if "diverged" not in run and "clients" in run]
        return [each for each in found if all(map(math.isfinite, _numbers(each)))]

    @property
    def target(self) -> float | None:
        """The headline for rounds-to-target; None where its runs have different ones."""
        found = {axes(run).get("target") for run in self.runs}
        return found.pop() if len(found) == 1 else None

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
        curves = [_finite_points(run) for run in self.runs if "diverged" not in run]
        curves = [(rounds, values) for rounds, values in curves if len(rounds)]
        if not curves:
            return None
        rounds = curves[0][0]
        stacked = np.stack([np.interp(rounds, *curve) for curve in curves])
        return Curve(rounds, stacked.mean(0), stacked.min(0), stacked.max(0))


def common_seeds(one: Series, other: Series) -> set[int]:
    """The seeds that both have."""
    return {*one.seeds} & {*other.seeds}


def gained(before: Series | None, after: Series | None) -> float | None:
    """How much better the second is, over the seeds that both have; in points where the headline is in percent.

    nan where it diverged and the first did not. None where there is nothing to compare: one of the two was not run, the
    first diverged, or no seed is common to both.
    """
    if before is None or after is None or math.isnan(before.mean):
        return None
    if math.isnan(after.mean):
        return math.nan
    seeds = common_seeds(before, after)
    return before.headline.gain(before.over(seeds), after.over(seeds)) if seeds else None


def _finite_points(run: ResultRow) -> tuple[np.ndarray, np.ndarray]:
    rounds, values = (np.array(run["curve"][axis], dtype=float) for axis in ("round", "all"))
    finite = np.isfinite(values)
    return rounds[finite], values[finite]


def _numbers(spread: Spread) -> list[float]:
    return [spread["mean"], spread["worst_tenth"], spread["spread"], *spread.get("each", ())]


def first_at_target(run: ResultRow) -> int | None:
    """The first round of a run that reaches the target."""
    return None if "diverged" in run else run["rounds_to_target"]


def method_title(algorithm: str, penalty: str = "") -> str:
    """The name of an algorithm, and of the penalty that is added to it."""
    return "+".join(part_title(kind, name) for kind, name in (("algorithm", algorithm), ("penalty", penalty)) if name)


def part_title(kind: str, name: str) -> str:
    """The title of a part of fedman's own; of one from outside, which is not imported, its name without the module.

    >>> part_title("algorithm", "feddc"), part_title("algorithm", "my_package.fedfoo:FedFoo")
    ('FedDC', 'FedFoo')
    """
    known = PARTS[kind].built_in.get(name)
    return known.title if known else name.rpartition(":")[2] or name


def penalty_of(config: Settings) -> str:
    """The penalty of a run; "" where ζ = 0."""
    return str(config.get("penalty", MAN)) if config["zeta"] else ""


def penalty_order(penalty: str) -> tuple[int, str]:
    """None first, then fedman's own, then others by name."""
    return position(["", *PENALTIES.built_in], penalty), penalty


def algorithms_of(settings: Iterable[Setting]) -> list[str]:
    """The algorithms of these settings, in the paper's order of rows; then others by name."""
    return sorted({each.algorithm for each in settings}, key=lambda name: (method_order(name), name))


def penalties_of(settings: Iterable[Setting]) -> list[str]:
    """The penalties of these settings, in their order."""
    return sorted({each.penalty for each in settings} - {""}, key=penalty_order)


def method_order(algorithm: str) -> int:
    """The paper's order of rows."""
    return position([*METHODS, *(name for name in ALGORITHMS if name not in METHODS)], algorithm)


def seeds_text(seeds: Iterable[int]) -> str:
    """seed 0; seeds 0, 2."""
    known = sorted(set(seeds))
    return f"seed{'s' if len(known) > 1 else ''} {', '.join(map(str, known))}"


def common_seeds_text(pairs: Iterable[tuple[Series, Series]]) -> str:
    """The seeds over which pairs are compared: seeds 0, 1, 2; or some of them, where pairs have fewer."""
    found = [seeds for pair in pairs if (seeds := common_seeds(*pair))]
    every = {seed for seeds in found for seed in seeds}
    fewer = " or some of them" if any(seeds != every for seeds in found) else ""
    return seeds_text(every) + fewer if found else "no seed"


def slug(name: str) -> str:
    """A name that is safe in a file's name, in an attribute and in a style, and not too long for any."""
    safe = "".join(c if c.isalnum() or c in "-." else "-" for c in name).strip("-.") or "data"
    if len(safe.encode()) <= SLUG_BYTES:
        return safe
    return f"{safe.encode()[: SLUG_BYTES - 9].decode(errors='ignore')}-{sha256(safe.encode())[:8]}"


def series(rows: Sequence[ResultRow]) -> list[Series]:
    """All series of these runs, in the paper's order.

    Usual values are the paper's for its data sets and models, else the most frequent ones of the data set, model and
    algorithm among runs with one headline. Runs that differ in precision alone make two series; the one with more
    seeds, or of the more frequent precision, is the main one, and has the runs that diverged in earlier versions, which
    did not record their precision.
    """
    headlines = _headlines(rows)
    models = _other_models(rows, headlines)
    configs: dict[tuple[str, str, str, Headline], list[Settings]] = {}
    for row, model, compared in zip(rows, models, headlines, strict=True):
        key = axes(row)["dataset"], model, axes(row)["algorithm"], compared
        configs.setdefault(key, []).append(said(row["config"]))
    usual = {key: _most_frequent(members) for key, members in configs.items()}
    frequency = Counter(map(_precision, rows))
    groups: dict[tuple[Setting, str, Headline], dict[str, dict[int, ResultRow]]] = {}
    for row, model, compared in zip(rows, models, headlines, strict=True):
        a, config = axes(row), said(row["config"])
        known = usual[a["dataset"], model, a["algorithm"], compared]
        changes = _changes(config, known | (_papers(config) if compared == Headline() and not model else {}))
        setting = Setting(a["dataset"], a["partition"], a["algorithm"], penalty_of(config), a["zeta"], changes)
        group = groups.setdefault((setting, model, compared), {})
        group.setdefault(_precision(row), {}).setdefault(a["seed"], row)
    made = []
    for (setting, model, compared), by_precision in groups.items():
        unknown = by_precision.pop("", {})
        main = max(by_precision, key=lambda p: (len(by_precision[p]), frequency[p], p), default="")
        by_precision[main] = unknown | by_precision.get(main, {})
        for precision, by_seed in by_precision.items():
            other = "" if precision == main else f"precision={precision}"
            variant = ", ".join(filter(None, (setting.variant, other)))
            runs = [by_seed[seed] for seed in sorted(by_seed)]
            made.append(Series(**(vars(setting) | {"variant": variant}), headline=compared, runs=runs, model=model))
    return sorted(made, key=_order)


def left_out(rows: Sequence[ResultRow], shown: Iterable[Series]) -> list[str]:
    """A sentence about the runs that are in no series, because another has the same setting and seed; none if there
    are none."""
    kept = {id(run): run for s in shown for run in s.runs}
    alike: dict[tuple[object, ...], list[Settings]] = {}
    for run in kept.values():
        alike.setdefault(_place(run), []).append(said(run["config"]))
    out, keys = 0, set()
    for row in (row for row in rows if id(row) not in kept):
        apart = [set(differing(said(row["config"]), config)) for config in alike.get(_place(row), ())]
        if not row["config"]["zeta"] and any("penalty" in found for found in apart):
            continue  # with ζ = 0 another penalty is the same run
        out += 1
        keys |= next((found for found in apart if found <= {*HOUSEKEEPING}), set()) - {*LOCAL}
    runs = "run is" if out == 1 else "runs are"
    why = f", apart from {', '.join(sorted(keys))}" if keys else ""
    return [f"{out} {runs} not shown: others have the same setting and seed{why}."] if out else []


def _place(row: ResultRow) -> tuple[object, ...]:
    """Where a run stands among others; what ζ weighs is nothing where it is 0."""
    config = said(row["config"]) | {"penalty": penalty_of(row["config"])}
    return *(config.get(key) for key in AXES), config.get("model")


def _other_models(rows: Sequence[ResultRow], headlines: Sequence[Headline]) -> list[str]:
    """The model of each run where it is not the usual one: the paper's, else the most frequent one on these data."""
    places = [(axes(row)["dataset"], compared) for row, compared in zip(rows, headlines, strict=True)]
    models = [str(row["config"].get("model", "")) for row in rows]
    found: dict[tuple[str, Headline], list[str]] = {}
    for place, model in zip(places, models, strict=True):
        found.setdefault(place, []).append(model)
    usual = {
        (dataset, compared): _papers({"dataset": dataset}).get("model") or statistics.mode(sorted(names))
        for (dataset, compared), names in found.items()
    }
    return ["" if model == usual[place] else model for place, model in zip(places, models, strict=True)]


def _headlines(rows: Sequence[ResultRow]) -> list[Headline]:
    """What each run is compared by; one that diverged by what others of its task are, on its data or elsewhere."""
    known: dict[tuple[object, ...], Headline] = {}
    for row in rows:
        if "diverged" not in row:
            for key in _kinds(row):
                known.setdefault(key, headline_of(row))
    return [
        next((known[key] for key in _kinds(row) if key in known and "diverged" in row), headline_of(row))
        for row in rows
    ]


def _kinds(row: ResultRow) -> list[tuple[object, ...]]:
    data, task = axes(row)["dataset"], row["config"].get("task")
    return [(data, task), ("", task)] if task else [(data, task)]


def papers_variant(config: Settings) -> str:
    """The variant of a run against the paper's setting; none where its data set is not one of the paper's."""
    return _changes(config, _papers(config))


def _order(s: Series) -> tuple[object, ...]:
    data = position(paper.TITLES, s.dataset), s.dataset, s.headline.name, s.headline.lower_is_better, s.model
    place = position(paper.PARTITIONS, s.partition), s.partition
    return *data, *place, method_order(s.algorithm), s.algorithm, penalty_order(s.penalty), s.zeta, s.variant


def position(names: Iterable[str], name: str) -> int:
    """Unknown names come last."""
    known = list(names)
    return known.index(name) if name in known else len(known)


def _precision(row: ResultRow) -> str:
    return row.get("precision", "")


def _most_frequent(configs: Sequence[Settings]) -> Settings:
    """The most frequent value of each key."""
    found: Settings = {}
    for key in {key for config in configs for key in config}:
        values = {repr(config[key]): config[key] for config in configs if key in config}
        found[key] = values[statistics.mode(sorted(repr(config[key]) for config in configs if key in config))]
    return found


def said(config: Settings) -> Settings:
    """A configuration with the values that it leaves out, those that older ones do not have."""
    return {**UNSAID, **config}


def _papers(config: Settings) -> Settings:
    """The paper's setting for a run's data, algorithm and ζ; empty where it has none."""
    keys: Settings = {k: config[k] for k in ("partition", "algorithm", "zeta") if k in config}
    if keys.get("algorithm") not in ALGORITHMS.built_in:
        keys.pop("algorithm", None)  # the name of a module, which is not imported
    try:
        name = str(config.get("dataset"))
        return said(resolve(keys, PRESETS[f"{name}-dir0.3"]).flat()) if name in paper.TABLES else {}
    except UserError:
        return {}  # a results file of another version of the program


def _changes(config: Settings, usual: Settings) -> str:
    """The keys with other values than the usual ones, as they would be typed."""
    apart = (*AXES, *HOUSEKEEPING)
    changed = {k: v for k, v in sorted(config.items()) if k not in apart and v != usual.get(k, v)}
    return ", ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in changed.items())
