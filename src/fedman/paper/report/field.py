"""The field after the paper (docs/field.md): which runs are whose, tuned and with the defaults."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedman.paper.flatness.flatness_json import FlatnessRecord, Measurements
from fedman.paper.presets import TUNED, ZETA
from fedman.paper.report.compare import Cell, Comparison
from fedman.paper.report.hessian import MODEL, best_of, samples_text
from fedman.paper.report.series import (
    AXES,
    HOUSEKEEPING,
    MAN,
    Series,
    common_seeds_text,
    gained,
    penalty_of,
    said,
    series,
)
from fedman.paper.report.sources import FieldSources
from fedman.paper.report.tables import BLANK
from fedman.runs.records import Headline, ResultRow, Settings, decisive, headline
from fedman.runs.results import identity, settings_identity
from fedman.runs.tune import Tried, Tuning

DATASET, PLACE = "cifar100", "dir0.3"  # the latter: where methods were tuned, ranked and measured
Method = tuple[str, str]
"""An algorithm and a penalty, "" where there is none."""
Penalised = tuple[str, float, str]
"""A penalty, its ζ, and what else is changed."""
PLAIN: Penalised = ("", 0.0, "")
METHODS: list[Method] = [(algorithm, penalty) for algorithm in TUNED for penalty in ("", MAN)]


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
        return series_text(self.get(study, method, partition))

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


def series_text(s: Series | None) -> str:
    """Mean ± standard deviation in the table; an empty cell for what was not measured."""
    return s.text + s.mark if s else BLANK
