"""Measured beside printed: differences, marks, gains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fedman.paper import targets as paper
from fedman.paper.presets import ZETA
from fedman.paper.report.series import Series
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
    """A method on a partition: what was measured, and what the paper prints."""

    series: Series
    target: Target | None

    @property
    def difference(self) -> float | None:
        """Measured mean − printed mean, in points."""
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
        """Measured over printed rounds to the target; None unless both get there."""
        measured = self.series.rounds_to_target
        if self.target is None or self.target.rounds is None or math.isinf(measured):
            return None
        return measured / self.target.rounds

    @property
    def rounds_agree(self) -> bool | None:
        """Within 20 % of the printed rounds or faster, or both never; None where the paper gives none."""
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
    def printed_gain(self) -> float | None:
        """What it adds in the paper."""
        plain, man = self.plain.target, self.man.target
        return man.accuracy - plain.accuracy if plain and man else None


@dataclass(frozen=True)
class Board:
    """One data set: the cells of its table, and what else was run on it."""

    dataset: str
    zeta: float
    cells: list[Cell]
    others: list[Series]  # variants, and other ζ

    @property
    def title(self) -> str:
        return paper.title(self.dataset)

    @property
    def printed(self) -> bool:
        """Whether the paper has this table."""
        return paper.covers(self.dataset)

    @property
    def partitions(self) -> list[str]:
        return list(dict.fromkeys(cell.series.partition for cell in self.cells))

    @property
    def pairs(self) -> list[Pair]:
        """Every algorithm and partition that was run both ways."""
        found = {(c.series.partition, c.series.algorithm, c.series.man): c for c in self.cells}
        return [
            Pair(cell, found[p, a, True]) for (p, a, man), cell in found.items() if not man and (p, a, True) in found
        ]

    @property
    def seeds(self) -> tuple[int, int]:
        """The smallest and the largest number of seeds of a cell."""
        counts = [len(cell.series.runs) for cell in self.cells]
        return min(counts), max(counts)

    def of(self, partition: str) -> list[Cell]:
        """The cells of a partition."""
        return [cell for cell in self.cells if cell.series.partition == partition]

    def zeta_series(self) -> list[list[Series]]:
        """The series of each algorithm and partition that was run with three ζ > 0 or more, ζ ascending."""
        lines: dict[tuple[str, str], list[Series]] = {}
        for s in [*(cell.series for cell in self.cells), *self.others]:
            if not s.variant:
                lines.setdefault((s.partition, s.algorithm), []).append(s)
        return [sorted(line, key=lambda s: s.zeta) for line in lines.values() if sum(s.man for s in line) >= 3]

    def variants(self) -> list[tuple[str, Series, Cell | None]]:
        """Series apart from the table and the ζ study: how each departs, and the cell it departs from."""
        study = {id(s) for line in self.zeta_series() for s in line}
        found = {(c.series.partition, c.series.algorithm, c.series.man): c for c in self.cells}
        made = []
        for s in self.others:
            if id(s) not in study:
                words = [s.departs] if s.variant else []
                words += [f"ζ={s.zeta:g}"] if s.zeta not in (0, self.zeta) else []
                made.append((", ".join(words), s, found.get((s.partition, s.algorithm, s.man))))
        return made


def boards(everything: Iterable[Series]) -> list[Board]:
    """A board for each data set."""
    by_dataset: dict[str, list[Series]] = {}
    for s in everything:
        by_dataset.setdefault(s.dataset, []).append(s)
    made = []
    for dataset, members in by_dataset.items():
        zeta = ZETA.get(dataset) or _commonest([s for s in members if s.man])
        main = [s for s in members if not s.variant and s.zeta in (0, zeta)]
        cells = [Cell(s, paper.target(dataset, s.partition, s.algorithm, s.man)) for s in main]
        made.append(Board(dataset, zeta, cells, [s for s in members if s not in main]))
    return made


def swapped(cell: Cell) -> Target | None:
    """The paper's cell if its two Dirichlet headers have changed places."""
    s = cell.series
    return paper.target(s.dataset, paper.SWAPPED.get(s.partition, s.partition), s.algorithm, s.man)


def _commonest(members: list[Series]) -> float:
    counts = Counter(s.zeta for s in members for _ in s.runs if not s.variant)
    return counts.most_common(1)[0][0] if counts else 0.0
