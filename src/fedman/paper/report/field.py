"""The field after the paper (docs/field.md): tuned beside default, ranked, with and without MAN; penalties against MAN;
whether flatness follows accuracy. What was not measured is an empty cell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from fedman.paper import targets as paper
from fedman.paper.flatness.flatness_json import FlatnessRecord, Measurements
from fedman.paper.presets import PARTITIONS, TUNED, ZETA
from fedman.paper.report.compare import Cell, Comparison
from fedman.paper.report.figure import SHEET, Picture, colour, finish, panel
from fedman.paper.report.hessian import MODEL, best_of, samples_text
from fedman.paper.report.narrative import ranks
from fedman.paper.report.series import (
    AXES,
    HOUSEKEEPING,
    MAN,
    Series,
    common_seeds_text,
    gained,
    method_title,
    part_title,
    penalty_of,
    penalty_order,
    position,
    said,
    seeds_text,
    series,
)
from fedman.paper.report.sources import FieldSources
from fedman.paper.report.tables import BLANK, Table, gain_text, points, rounds_text, unexplained
from fedman.runs.records import Headline, ResultRow, Settings, axes, decisive, headline
from fedman.runs.results import identity, settings_identity
from fedman.runs.text_tables import mean_std
from fedman.runs.tune import Tried, Tuning

DATASET, PLACE = "cifar100", "dir0.3"  # the latter: where methods were tuned, ranked and measured
Method = tuple[str, str]
"""An algorithm and a penalty, "" where there is none."""
Penalised = tuple[str, float, str]
"""A penalty, its ζ, and what else is changed."""
PLAIN: Penalised = ("", 0.0, "")
SIDES: dict[str, Callable[[Settings], object]] = {
    "all": lambda config: True,
    "plain": lambda config: not config["zeta"],
    "with MAN": lambda config: config["zeta"],
}
METHODS: list[Method] = [(algorithm, penalty) for algorithm in TUNED for penalty in ("", MAN)]


class Measure(NamedTuple):
    """A measure of sharpness: its name for people, and its value among what was measured of a model."""

    title: str
    of: Callable[[Measurements], float | None]


MEASURES = {
    "hessian": Measure("λ_max of the Hessian", lambda m: m["top"]["values"][0] if "top" in m else None),
    "trace": Measure("trace of the Hessian", lambda m: m["trace"]["value"] if "trace" in m else None),
    "gauss-newton": Measure(
        "λ_max of the Gauss-Newton matrix", lambda m: m["gauss_newton"]["top"] if "gauss_newton" in m else None
    ),
    "average": Measure("average adaptive sharpness", lambda m: _sharpness(m, "average")),
    "worst-2": Measure("worst-case adaptive sharpness, p = 2", lambda m: _sharpness(m, "worst_2")),
    "worst-inf": Measure("worst-case adaptive sharpness, p = ∞", lambda m: _sharpness(m, "worst_inf")),
    "m-2": Measure("m-sharpness, p = 2", lambda m: _sharpness(m, "m_2")),
    "m-inf": Measure("m-sharpness, p = ∞", lambda m: _sharpness(m, "m_inf")),
}


@dataclass(frozen=True)
class Study(Comparison):
    """A comparison under a name of its own, which is not held against the paper's tables."""

    id: str = ""
    heading: str = ""

    @property
    def title(self) -> str:
        return self.heading

    @property
    def name(self) -> str:
        return self.id

    @property
    def in_paper(self) -> bool:
        return False


@dataclass(frozen=True)
class Field:
    """All that is known of the field."""

    tuned: Study
    default: Study
    choices: Mapping[Method, Tried]
    hopeless: frozenset[Method]  # every setting that was tried diverged, and none could be chosen
    penalised: Mapping[str, Mapping[Penalised, Series]]  # by algorithm: none, MAN, other penalties, more weight decay
    models: list[tuple[ResultRow, Measurements]]  # what was measured of which tuned run, at PLACE
    tunings: list[Tuning]

    def get(self, study: Study, method: Method, partition: str = PLACE) -> Series | None:
        """The series of a method in one of the two studies."""
        found = (c.series for c in study.of(partition) if (c.series.algorithm, c.series.penalty) == method)
        return next(found, None)

    def gained(self, study: Study, before: Method, after: Method, partition: str = PLACE) -> float | None:
        """By how many points the second method is better; nan where it alone diverges, with any seed or in all runs of
        its tuning; None where there is nothing to compare."""
        base = self.get(study, before, partition)
        if study is self.tuned and after in self.hopeless:
            return math.nan if base and math.isfinite(base.mean) else None
        return gained(base, self.get(study, after, partition))

    def gains(self, study: Study, partition: str = PLACE) -> dict[str, float]:
        """What MAN adds to every algorithm that was run both ways, as `gained`."""
        found = {a: self.gained(study, (a, ""), (a, MAN), partition) for a in TUNED}
        return {algorithm: gain for algorithm, gain in found.items() if gain is not None}

    def seeds_of_gains(self, study: Study, partition: str = PLACE) -> str:
        """The seeds over which these are."""
        pairs = ([self.get(study, (a, p), partition) for p in ("", MAN)] for a in self.gains(study, partition))
        return common_seeds_text((plain, man) for plain, man in pairs if plain and man)

    def tuning_gains(self) -> dict[Method, float]:
        """What tuning adds to every method that was run both ways, in points; nan where it diverges tuned alone."""
        found = {m: gained(self.get(self.default, m), self.get(self.tuned, m)) for m in METHODS}
        return {method: gain for method, gain in found.items() if gain is not None}

    def tuning_pairs(self) -> list[tuple[Series, Series]]:
        """The default and the tuned runs of these methods."""
        pairs = ((self.get(self.default, m), self.get(self.tuned, m)) for m in self.tuning_gains())
        return [(default, tuned) for default, tuned in pairs if default and tuned]

    def accuracy(self, study: Study, method: Method, partition: str = PLACE) -> str:
        """An accuracy in the table, or that the method diverged."""
        if study is self.tuned and partition == PLACE and method in self.hopeless:
            return "diverged"
        return _text(self.get(study, method, partition))

    def samples(self, *names: str) -> str:
        """On how many samples these measurements were made."""
        return samples_text((measured for _, measured in self.models), names)

    @cached_property
    def ranked(self) -> list[Method]:
        """The methods by their tuned accuracy; those that were not measured, or diverged, come last."""

        def place(method: Method) -> float:
            found = self.get(self.tuned, method)
            return -found.mean if found and math.isfinite(found.mean) else math.inf

        return sorted(METHODS, key=place)


def field(found: FieldSources, papers: Sequence[ResultRow]) -> Field | None:
    """The field as far as it was run; None where nothing was. The defaults of the paper's methods are `papers` rows."""
    if not found.rows and not found.tunings:
        return None
    rows = {identity(row): row for row in (*papers, *found.rows) if row["config"].get("dataset") == DATASET}
    usual_model = (s for s in series(list(rows.values())) if s.headline == Headline() and not s.model)
    members = [s for s in usual_model if s.algorithm in TUNED]
    settings: dict[Method, list[Tried]] = {}
    for tried in (tried for tuning in found.tunings for tried in tuning["settings"]):
        settings.setdefault(method_of(tried["config"]), []).append(tried)
    choices = {method: tried for method, of in settings.items() for tried in of if tried["chosen"]}
    hopeless = frozenset(m for m, of in settings.items() if all(None in tried["scores"].values() for tried in of))
    usual = [s for s in members if s.papers_method and s.zeta in (0, ZETA[DATASET])]
    tuned = [s for s in usual if (choice := choices.get((s.algorithm, s.penalty))) and _same(s, choice)]
    default = [s for s in usual if not s.variant]
    here = [s for s in members if s.partition == PLACE]
    others = {s.algorithm for s in here if _compared(s)}
    penalised = {
        a: {(s.penalty, s.zeta, s.variant): s for s in here if s.algorithm == a and (s in default or _compared(s))}
        for a in TUNED
        if a in others
    }
    measured = _measured(found.flatness)
    models = [
        (run, measured[name])
        for s in tuned
        for run in s.runs
        if s.partition == PLACE and math.isfinite(headline(run)) and (name := identity(run)) in measured
    ]
    return Field(
        _study("field-tuned", "The field, tuned", tuned),
        _study("field-default", "The field, defaults", default),
        choices,
        hopeless,
        penalised,
        models,
        found.tunings,
    )


def ranking(data: Field) -> Table:
    """Every method on the partition it was tuned on, the best first."""
    target = next((s.target for c in (*data.tuned.cells, *data.default.cells) if (s := c.series).target), None)
    header = ["rank", "method", "tuned", "default", "tuning adds", "chosen", f"rounds to {target or 50:g} %", "s",
              "λ_max", "trace"]  # fmt: skip
    rows, adds = [], data.tuning_gains()
    means = [c.series.mean for c in data.tuned.of(PLACE) if math.isfinite(c.series.mean)]
    for method in data.ranked:
        tuned = data.get(data.tuned, method)
        text = data.accuracy(data.tuned, method), data.accuracy(data.default, method)
        tuned = tuned if tuned and math.isfinite(tuned.mean) else None
        rows.append(
            [
                str(1 + sum(mean > tuned.mean + 1e-9 for mean in means)) if tuned else BLANK,
                method_title(*method),
                *text,
                gain_text(adds.get(method)),
                setting_text(data.choices.get(method)),
                rounds_text(tuned) if tuned else BLANK,
                _seconds(tuned),
                _mean_measure(data, tuned, "hessian", ".2f"),
                _mean_measure(data, tuned, "trace", ".0f"),
            ]
        )
    note = (
        f"Accuracy of the mean of all clients in %, {_seeds(data.tuned, PLACE)}, ζ = {ZETA[DATASET]:g}. Settings were "
        "chosen among six for each method, on training samples held out. Tuning adds: over the seeds that both have, "
        f"{common_seeds_text(data.tuning_pairs())}. s: seconds a run, stacked with others. λ_max and trace: of the "
        f"mean cross-entropy on {data.samples('top', 'trace')}, at the tuned models{_of_seeds(data)}. diverged: with "
        f"one seed or more, or with every setting that was tried. –: not measured, or diverged. {unexplained(rows)}"
    )
    title = f"CIFAR-100, {paper.partition_title(PLACE)}: the field"
    return Table("field-ranking", title, header, rows, note.strip(), 2)


def partitions(data: Field) -> Table:
    """Tuned beside default on every partition."""
    header = ["method", *(f"{paper.partition_title(p)}, {how}" for p in PARTITIONS for how in ("tuned", "default"))]
    rows = []
    for method in data.ranked:
        found = [data.accuracy(study, method, p) for p in PARTITIONS for study in (data.tuned, data.default)]
        rows.append([method_title(*method), *found])
    note = (
        "Chosen once, on Dirichlet 0.3. Where the defaults were chosen, the two columns hold the same runs; on iid the "
        f"paper has another ρ for FedASAM+MAN and FedSpeed. Without ±: one seed. –: not measured. {unexplained(rows)}"
    )
    return Table("field-partitions", "CIFAR-100: the field on three partitions", header, rows, note.strip())


def gains(data: Field) -> Table:
    """What MAN adds to every algorithm."""
    columns = {
        f"{paper.partition_title(p)}, {how}": (study, p)
        for p in PARTITIONS
        for how, study in (("tuned", data.tuned), ("default", data.default))
    }
    header = ["algorithm", *columns]
    rows = [[method_title(a), *(_gain(data, study, a, p) for study, p in columns.values())] for a in TUNED]
    over = [f"{title}: {data.seeds_of_gains(*of)}" for title, of in columns.items() if data.gains(*of)]
    note = (
        f"Over the seeds that both have ({'; '.join(over) or 'none'}). diverges: with MAN and not without, with one "
        f"seed or more or in all runs of its tuning. –: not measured, or diverged without MAN. {unexplained(rows)}"
    ).strip()
    return Table("field-gains", "CIFAR-100: points that MAN adds", header, rows, note)


def penalties(data: Field) -> Table:
    """Other penalties, and more weight decay, beside MAN."""
    algorithms = list(data.penalised)
    kinds = dict.fromkeys(kind for of in data.penalised.values() for kind in of)
    rows = []
    for penalty, zeta, variant in sorted(kinds, key=lambda k: (bool(k[2]), penalty_order(k[0]), k[1:])):
        cells = []
        for a in algorithms:
            of, kind = data.penalised[a], (penalty, zeta, variant)
            known, base = of.get(kind), of.get(PLAIN)
            cells += [_text(known), gain_text(gained(base, known)) if kind != PLAIN else BLANK]
        rows.append([penalty_title(penalty, variant), f"{zeta:g}" if penalty else BLANK, *cells])
    header = ["penalty", "ζ", *(word for a in algorithms for word in (method_title(a), "against none"))]
    title = f"CIFAR-100, {paper.partition_title(PLACE)}: other penalties against MAN"
    pairs = ((of[PLAIN], s) for of in data.penalised.values() if PLAIN in of for kind, s in of.items() if kind != PLAIN)
    note = f"Algorithms with their defaults. Against none: over the seeds that both have, {common_seeds_text(pairs)}."
    note = f"{note} {unexplained(rows)}".strip()
    return Table("field-penalties", title, header, rows, note)


def correlations(data: Field) -> Table:
    """Spearman's rank correlation of each measure of sharpness with the test accuracy of the same model."""
    rows = []
    for name, measure in MEASURES.items():
        found = [(points(rho), str(count)) for rho, count in (correlation(data, name, side) for side in SIDES)]
        rows.append([measure.title, *(word for pair in found for word in pair)])
    header = ["measure", *(word for side in SIDES for word in (side, "models"))]
    note = (
        f"Spearman's ρ over the models tuned on Dirichlet 0.3{_of_seeds(data)}: −1 where the flatter model is always "
        "the more accurate one, 0 where they have nothing to do with each other. Measured on "
        f"{data.samples('top', 'trace', 'gauss_newton', 'sharpness')}."
    )
    return Table("field-sharpness", "Sharpness and test accuracy", header, rows if data.models else [], note)


def correlation(data: Field, name: str, side: str) -> tuple[float | None, int]:
    """The rank correlation of a measure with accuracy on one of the `SIDES`, and of how many models."""
    pairs = [(headline(row), value) for row, value in _pairs(data, name) if SIDES[side](row["config"])]
    return spearman(pairs), len(pairs)


def tried(data: Field) -> Table:
    """Every setting that was tried."""
    settings = [(str(tuning["rungs"][-1]), each) for tuning in data.tunings for each in tuning["settings"]]
    rows = []
    for last, each in sorted(settings, key=lambda found: position(TUNED, str(found[1]["config"]["algorithm"]))):
        value, known = each["scores"].get(last), last in each["scores"]
        score = (BLANK if not known else "diverged") if value is None else f"{value:.2f}"
        chosen, seconds = "●" if each["chosen"] else "", f"{each.get('seconds', math.nan):.1f}"
        rows.append([method_title(*method_of(each["config"])), setting_text(each), score, chosen, seconds])
    header = ["method", "setting", "accuracy on the samples held out, %", "chosen", "s"]
    return Table("field-tried", "Every setting that was tried", header, rows, words=2)


def scatter(data: Field) -> list[Picture]:
    """Test accuracy against the measures of the Hessian, a dot for each model."""
    pictures = []
    for name in ("hessian", "trace", "gauss-newton"):
        title = MEASURES[name].title
        pairs = [(row, value) for row, value in _pairs(data, name) if value > 0]
        if len(pairs) < 3:
            continue
        figure, axes = panel()
        dots = []
        for row, value in pairs:
            method = method_of(row["config"])
            tone = colour(method[0])
            fill = tone if method[1] else SHEET
            axes.plot(value, headline(row), "o", markersize=5, markerfacecolor=fill, markeredgecolor=tone)
            dots.append((value, headline(row), f"{method_title(*method)} {headline(row):.2f} %"))
        rho = spearman([(headline(row), value) for row, value in pairs])
        axes.set(title=f"ρ = {points(rho)}", xlabel=title, ylabel="test accuracy, %", xscale="log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        shown = f"The field: test accuracy against {title}"
        pictures.append(finish(f"field-{name}", shown, figure, {"points": dots}))
    return pictures


def caption(data: Field) -> str:
    """What these pictures show."""
    on = data.samples("top", "trace", "gauss_newton")
    return f"A dot for each tuned model, measured on {on}; open: plain, full: with MAN."


def penalty_title(penalty: str, variant: str) -> str:
    """A penalty in words: MAN; none, weight_decay=0.002."""
    return ", ".join(filter(None, (part_title("penalty", penalty) if penalty else "none", variant)))


def setting_text(choice: Tried | None) -> str:
    """A setting as it would be typed, without algorithm and ζ."""
    if choice is None:
        return BLANK
    apart = ("algorithm", "zeta")
    shown = {k: str(v).lower() if isinstance(v, bool) else v for k, v in choice["varied"].items() if k not in apart}
    return " ".join(f"{k}={v}" for k, v in shown.items())


def _study(name: str, heading: str, members: Iterable[Series]) -> Study:
    cells = [Cell(s, None) for s in members]
    return Study(DATASET, Headline(), {MAN: ZETA[DATASET]}, cells, [], id=name, heading=heading)


def method_of(config: Settings) -> Method:
    """The method of a configuration."""
    return str(config["algorithm"]), penalty_of(config)


def _same(s: Series, choice: Tried) -> bool:
    """Whether the runs of a series have a chosen setting, on any partition and with any seed."""
    apart = {*AXES, *HOUSEKEEPING, "validation"}
    ours, theirs = (
        {k: v for k, v in said(decisive(c)).items() if k not in apart} for c in (s.runs[0]["config"], choice["config"])
    )
    return ours == theirs


def _compared(s: Series) -> bool:
    """Whether it has another penalty than MAN, or no penalty and another weight decay."""
    decay_alone = s.variant.startswith("weight_decay=") and "," not in s.variant and not s.penalty
    return not s.papers_method or decay_alone


def _measured(records: Sequence[FlatnessRecord]) -> dict[str, Measurements]:
    """What was measured of the model of each run."""
    found: dict[str, list[Measurements]] = {}
    for record in records:
        if "config" in record["run"] and MODEL in record["models"]:
            found.setdefault(settings_identity(record["run"]["config"]), []).append(record["models"][MODEL])
    return {run: best_of(files) for run, files in found.items()}


def _pairs(data: Field, name: str) -> list[tuple[ResultRow, float]]:
    found = ((row, MEASURES[name].of(measured)) for row, measured in data.models)
    return [(row, value) for row, value in found if value is not None]


def _mean_measure(data: Field, s: Series | None, name: str, form: str) -> str:
    runs = {identity(run) for run in s.runs} if s else set()
    values = [value for row, value in _pairs(data, name) if identity(row) in runs]
    return mean_std(values, form) if values else BLANK


def _sharpness(measured: Measurements, name: str) -> float | None:
    found = measured["sharpness"]["measures"].get(name) if "sharpness" in measured else None
    return found["value"] if found else None


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's ρ; None for fewer than three pairs, or where one of the two does not vary."""
    if len(pairs) < 3 or any(len(set(values)) < 2 for values in zip(*pairs, strict=True)):
        return None
    one, other = (ranks(values) for values in zip(*pairs, strict=True))
    return float(np.corrcoef(one, other)[0, 1])


def _seconds(s: Series | None) -> str:
    found = [run["seconds"] for run in s.runs if "diverged" not in run] if s else []
    return f"{statistics.fmean(found):.1f}" if found else BLANK


def _seeds(data: Study, partition: str) -> str:
    cells = data.of(partition)
    return replace(data, cells=cells).seeds if cells else "no seeds"


def _of_seeds(data: Field) -> str:
    """Of which seeds models were measured."""
    return f", {seeds_text(axes(row)['seed'] for row, _ in data.models)}" if data.models else ""


def _text(s: Series | None) -> str:
    return s.text + s.mark if s else BLANK


def _gain(data: Field, study: Study, algorithm: str, partition: str) -> str:
    gain = data.gained(study, (algorithm, ""), (algorithm, MAN), partition)
    pair = (data.get(study, (algorithm, penalty), partition) for penalty in ("", MAN))
    return BLANK if gain is None else gain_text(gain) + max(s.mark for s in pair if s)
