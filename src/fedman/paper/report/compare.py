"""Measured accuracies beside the paper's: differences, marks, gains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from fedman.paper import targets as paper
from fedman.paper.presets import ZETA
from fedman.paper.report.series import Series, Setting
from fedman.paper.targets import Target

STD, POINT, ABOVE, BELOW, NONE = "std", "point", "above", "below", ""
MARKS = {
    STD: ("●", "within 1 std of the paper"),
    POINT: ("◐", "within 1 point"),
    ABOVE: ("▲", "above by more than a point"),
    BELOW: ("▼", "below by more than a point"),
    NONE: ("", "nothing to compare"),
}
TOLERANCE = 0.2  # of rounds-to-target


@dataclass(frozen=True)
class Cell:
    """A method on a partition: what was measured, and the paper's figures."""

    series: Series
    target: Target | None

    @property
    def difference(self) -> float | None:
        """Measured mean − the paper's mean, in points."""
        return None if self.target is None or math.isnan(self.series.mean) else self.series.mean - self.target.accuracy

    @property
    def mark(self) -> str:
        """How close: within the paper's standard deviation, within a point, or off on either side."""
        d = self.difference
        if d is None or self.target is None:
            return BELOW if self.target and math.isnan(self.series.mean) else NONE
        if abs(d) <= self.target.std + 1e-9:
            return STD
        if abs(d) <= 1 + 1e-9:
            return POINT
        return ABOVE if d > 0 else BELOW

    @property
    def rounds_ratio(self) -> float | None:
        """Measured rounds to the target over the paper's; None unless both reach it."""
        measured = self.series.rounds_to_target
        if self.target is None or self.target.rounds is None or math.isinf(measured):
            return None
        return measured / self.target.rounds

    @property
    def rounds_agree(self) -> bool | None:
        """At most 20 % more than the paper's rounds; where it never gets there, not in the first 80 % of the rounds.

        None where the paper has no target.
        """
        if self.target is None or self.series.target is None:
            return None
        if self.target.rounds is None:
            return self.series.rounds_to_target > self.series.length * (1 - TOLERANCE)
        return self.rounds_ratio is not None and self.rounds_ratio <= 1 + TOLERANCE


@dataclass(frozen=True)
class Pair:
    """An algorithm on a partition without and with MAN."""

    plain: Cell
    man: Cell

    @property
    def gain(self) -> float:
        """What MAN adds, in points."""
        return self.man.series.mean - self.plain.series.mean

    @property
    def paper_gain(self) -> float | None:
        """What it adds in the paper."""
        plain, man = self.plain.target, self.man.target
        return man.accuracy - plain.accuracy if plain and man else None


@dataclass(frozen=True)
class Comparison:
    """One data set: the cells of its table, and what else was run on it."""

    dataset: str
    zeta: float
    cells: list[Cell]
    others: list[Series]  # variants, and other ζ

    @property
    def title(self) -> str:
        return paper.title(self.dataset)

    @property
    def in_paper(self) -> bool:
        """Whether the paper has a table for this data set."""
        return self.dataset in paper.TABLES

    @property
    def partitions(self) -> list[str]:
        return list(dict.fromkeys(cell.series.partition for cell in self.cells))

    @property
    def all_series(self) -> list[Series]:
        return [*(cell.series for cell in self.cells), *self.others]

    @property
    def target(self) -> float | None:
        """The accuracy for rounds-to-target, in percent."""
        return next((cell.series.target for cell in self.cells), None)

    @property
    def pairs(self) -> list[Pair]:
        """Every algorithm and partition that was run both ways."""
        found = [(cell, self.cell(cell.series, man=True)) for cell in self.cells if not cell.series.man]
        return [Pair(plain, man) for plain, man in found if man is not None]

    @property
    def seeds(self) -> str:
        """How many seeds the cells have."""
        counts = sorted({len(cell.series.runs) for cell in self.cells})
        if len(counts) > 1:
            return f"{counts[0]} to {counts[-1]} seeds"
        return "one seed" if counts == [1] else f"{counts[0]} seeds"

    def of(self, partition: str) -> list[Cell]:
        """The cells of a partition."""
        return [cell for cell in self.cells if cell.series.partition == partition]

    def cell(self, of: Setting, man: bool) -> Cell | None:
        """The cell of the same algorithm and partition, with or without MAN."""
        key = of.partition, of.algorithm, man
        return next((c for c in self.cells if (c.series.partition, c.series.algorithm, c.series.man) == key), None)

    def zeta_studies(self) -> list[list[Series]]:
        """The series of each algorithm and partition that was run with three ζ > 0 or more, ζ ascending."""
        studies: dict[tuple[str, str], list[Series]] = {}
        for s in self.all_series:
            if not s.variant:
                studies.setdefault((s.partition, s.algorithm), []).append(s)
        return [sorted(study, key=lambda s: s.zeta) for study in studies.values() if sum(s.man for s in study) >= 3]

    def variants(self) -> list[tuple[str, Series, Cell | None]]:
        """Series outside the table and the ζ studies: what is changed in each, and the cell it is a variant of."""
        studied = [s for study in self.zeta_studies() for s in study]
        made = []
        for s in self.others:
            if s not in studied:
                zeta = f"ζ={s.zeta:g}" if s.zeta not in (0, self.zeta) else ""
                made.append((", ".join(filter(None, (s.variant, zeta))), s, self.cell(s, s.man)))
        return made


def comparisons(all_series: Iterable[Series]) -> list[Comparison]:
    """A comparison for each data set; the series are in the paper's order."""
    made = []
    for dataset, group in groupby(all_series, lambda s: s.dataset):
        members = list(group)
        usual = Counter(s.zeta for s in members for _ in s.runs if s.man and not s.variant)
        zeta = ZETA.get(dataset) or max(usual, key=usual.__getitem__, default=0.0)
        main = [s for s in members if not s.variant and s.zeta in (0, zeta)]
        cells = [Cell(s, paper.target(dataset, s.partition, s.algorithm, s.man)) for s in main]
        made.append(Comparison(dataset, zeta, cells, [s for s in members if s not in main]))
    return made


def headers_swapped(cell: Cell) -> Cell:
    """The cell beside the paper's figures with its two Dirichlet headers exchanged."""
    s = cell.series
    return Cell(s, paper.target(s.dataset, paper.SWAPPED.get(s.partition, s.partition), s.algorithm, s.man))
