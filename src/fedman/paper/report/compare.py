"""Measured figures beside each other and the paper's: differences, marks, gains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from fedman.config import PARTS
from fedman.data.catalog import SPECS
from fedman.paper import targets as paper
from fedman.paper.presets import ZETA
from fedman.paper.report.series import MAN, Series, Setting, gained, part_title, penalties_of, slug
from fedman.paper.targets import Target
from fedman.parts import hyperparameters
from fedman.runs.records import Headline, figures

STD, POINT, ABOVE, BELOW, NONE = "std", "point", "above", "below", ""
MARKS = {
    STD: ("●", "within 1 std of the paper"),
    POINT: ("◐", "within 1 point"),
    ABOVE: ("▲", "above by more than a point"),
    BELOW: ("▼", "below by more than a point"),
    NONE: ("", "nothing to compare"),
}
TOLERANCE = 0.2  # of rounds-to-target, more or fewer
POISONING = {
    kind: {kind} | {name for part in PARTS[kind].built_in.values() for name in hyperparameters(part)}
    for kind in ("attack", "aggregation")
}
"""The keys of attacks and of aggregation rules."""


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
    def has_papers_goal(self) -> bool:
        """Whether its rounds are to the target of which the paper gives them, and no run was stopped early."""
        goal = self.series.target
        whole = not any("stopped" in run for run in self.series.runs)
        return bool(self.target and goal) and whole and goal == SPECS[self.series.dataset].target

    @property
    def rounds_ratio(self) -> float | None:
        """Measured rounds to the target over the paper's; None unless both reach it."""
        measured = self.series.rounds_to_target
        if not self.has_papers_goal or self.target is None or self.target.rounds is None or math.isinf(measured):
            return None
        return measured / self.target.rounds

    @property
    def rounds_mark(self) -> str:
        """STD: within 20 % of the paper's rounds, or neither gets there; ABOVE: fewer rounds; BELOW: more.

        Where only one of the two gets there, that one has needed fewer. NONE where the paper does not have this target.
        """
        if not self.has_papers_goal or self.target is None:
            return NONE
        here, there = (t is not None and t < math.inf for t in (self.series.rounds_to_target, self.target.rounds))
        if not (here and there):
            return STD if here == there else ABOVE if here else BELOW
        ratio = self.rounds_ratio or 0.0
        return STD if abs(ratio - 1) <= TOLERANCE + 1e-9 else ABOVE if ratio < 1 else BELOW


@dataclass(frozen=True)
class Pair:
    """An algorithm on a partition without and with a penalty."""

    plain: Cell
    penalised: Cell

    @property
    def gain(self) -> float | None:
        """How much better the penalty makes it; nan where it diverges with it alone."""
        return gained(self.plain.series, self.penalised.series)

    @property
    def paper_gain(self) -> float | None:
        """What it adds in the paper."""
        plain, man = self.plain.target, self.penalised.target
        return man.accuracy - plain.accuracy if plain and man else None


@dataclass(frozen=True)
class Comparison:
    """One data set, model and headline: the cells of its table, and what else was run on it."""

    dataset: str
    headline: Headline
    zetas: Mapping[str, float]  # the usual ζ of each penalty
    cells: list[Cell]
    others: list[Series]  # variants, and other ζ
    alone: bool = True  # whether all runs on this data set have this headline
    model: str = ""  # where it is not the usual one of the data set
    ties: Mapping[str, Sequence[float]] = field(
        default_factory=dict
    )  # by penalty: no ζ is usual, these are as frequent

    @property
    def title(self) -> str:
        model = f" with {self.model}" if self.model else ""
        return paper.title(self.dataset) + model + ("" if self.alone else f" ({self.headline.name})")

    @property
    def name(self) -> str:
        """For files and links."""
        model = f"-{slug(self.model)}" if self.model else ""
        return slug(self.dataset) + model + ("" if self.alone else f"-by-{slug(self.headline.name)}")

    @property
    def figures_name(self) -> str:
        """For the files of its main table."""
        return f"{self.name}-{'' if self.headline == Headline() else 'test-'}{slug(self.headline.name)}"

    @property
    def in_paper(self) -> bool:
        """Whether the paper has a table for this data set and model."""
        return self.dataset in paper.TABLES and self.headline == Headline() and not self.model

    @property
    def penalties(self) -> list[str]:
        """The penalties of its cells."""
        return penalties_of(cell.series for cell in self.cells)

    @property
    def added(self) -> str:
        """What is added to the plain algorithms, in a word: MAN, or another penalty."""
        return penalties_title(self.penalties)

    @property
    def zeta_text(self) -> str:
        """ζ = 0.15; of several penalties each one's; where none is usual that it is the smallest."""
        if len(self.penalties) > 1:
            return ", ".join(f"{part_title('penalty', p)} {self._zeta(p)}" for p in self.penalties)
        return self._zeta(self.penalties[0] if self.penalties else MAN)

    def _zeta(self, penalty: str) -> str:
        tied = self.ties.get(penalty)
        return f"ζ = {self.zetas.get(penalty, 0.0):g}" + (
            f" (the smallest of {len(tied)} tried as often)" if tied else ""
        )

    @property
    def more_figures(self) -> list[str]:
        """The task's other figures, such as perplexity."""
        runs = (run for cell in self.cells for run in cell.series.runs if "diverged" not in run)
        return [name for name in dict.fromkeys(n for run in runs for n in figures(run)) if name != self.headline.name]

    @property
    def partitions(self) -> list[str]:
        return list(dict.fromkeys(cell.series.partition for cell in self.cells))

    @property
    def all_series(self) -> list[Series]:
        return [*(cell.series for cell in self.cells), *self.others]

    @property
    def target(self) -> float | None:
        """The headline for rounds-to-target; None where cells have different ones."""
        found = {cell.series.target for cell in self.cells} - {None}
        return found.pop() if len(found) == 1 else None

    @property
    def pairs(self) -> list[Pair]:
        """Every algorithm and partition that was run both ways."""
        plain = [cell for cell in self.cells if not cell.series.penalty]
        found = [(cell, self.cell(cell.series, penalty)) for cell in plain for penalty in self.penalties]
        return [Pair(cell, penalised) for cell, penalised in found if penalised is not None]

    @property
    def gains(self) -> list[tuple[Pair, float]]:
        """What a penalty gains in each of these pairs, as far as it is known. Where none of its ζ is the usual one
        all of them count."""
        tied = [Cell(s, None) for s in self.others if not s.variant and s.zeta in self.ties.get(s.penalty, ())]
        more = [Pair(plain, cell) for cell in tied if (plain := self.cell(cell.series, "")) is not None]
        return [(pair, pair.gain) for pair in (*self.pairs, *more) if pair.gain is not None]

    @property
    def seeds(self) -> str:
        """How many seeds the cells have."""
        counts = sorted({len(cell.series.runs) for cell in self.cells})
        if len(counts) > 1:
            return f"{counts[0]} to {counts[-1]} seeds"
        return "one seed" if counts == [1] else f"{counts[0]} seeds"

    @property
    def precision(self) -> str:
        """The arithmetic of the cells' runs: "bf16"."""
        return ", ".join(sorted({r["precision"] for c in self.cells for r in c.series.runs if "diverged" not in r}))

    def picture_of(self, partition: str, kind: str, what: str) -> tuple[str, str]:
        """The name and the title of a figure of a partition."""
        name = f"{self.name}-{slug(partition)}-{kind}"
        return name, f"{self.title}, {paper.partition_title(partition)}: {what}"

    def of(self, partition: str) -> list[Cell]:
        """The cells of a partition."""
        return [cell for cell in self.cells if cell.series.partition == partition]

    def cell(self, of: Setting, penalty: str) -> Cell | None:
        """The cell of the same algorithm and partition, with this penalty or (where it is "") with none."""
        key = of.partition, of.algorithm, penalty
        return next((c for c in self.cells if (c.series.partition, c.series.algorithm, c.series.penalty) == key), None)

    def zeta_studies(self, least: int = 3) -> list[list[Series]]:
        """The series of each algorithm, partition and penalty with so many ζ > 0 or more, and ζ = 0; ζ ascending."""
        found: dict[tuple[str, str], dict[str, list[Series]]] = {}
        for s in self.all_series:
            if not s.variant:
                found.setdefault((s.partition, s.algorithm), {}).setdefault(s.penalty, []).append(s)
        return [
            sorted([*by_penalty.get("", []), *study], key=lambda s: s.zeta)
            for by_penalty in found.values()
            for penalty, study in by_penalty.items()
            if penalty and len(study) >= least
        ]

    def poisonings(self) -> dict[tuple[str, str, str], dict[tuple[str, str], list[Series]]]:
        """Series with different attacks or aggregation rules: by partition, algorithm and what else is changed in
        them, those of each attack and rule, without and with a penalty.
        """
        found: dict[tuple[str, str, str], dict[tuple[str, str], list[Series]]] = {}
        for s in self.all_series:
            changes = [each for each in self.changes(s).split(", ") if each]
            parts = {kind: [c for c in changes if c.partition("=")[0] in keys] for kind, keys in POISONING.items()}
            rest = ", ".join(each for each in changes if not any(each in own for own in parts.values()))
            attack, rule = (
                ", ".join([s.part(kind), *(each for each in own if not each.startswith(f"{kind}="))])
                for kind, own in parts.items()
            )
            found.setdefault((s.partition, s.algorithm, rest), {}).setdefault((attack, rule), []).append(s)
        return {key: group for key, group in found.items() if len(group) > 1}

    def variants(self) -> list[tuple[str, Series, Cell | None]]:
        """Other series outside the table: what is changed in each, and the cell it is a variant of."""
        studied = [s for study in self.zeta_studies() for s in study]
        studied += [s for group in self.poisonings().values() for members in group.values() for s in members]
        return [(self.changes(s), s, self.cell(s, s.penalty)) for s in self.others if s not in studied]

    def marked(self, text: str, *of: Series) -> str:
        """The text of a figure, with † beside the paper's if the code of one of these series is in no commit."""
        return text + (max(s.mark for s in of) if self.in_paper else "")

    def changes(self, s: Series, every_zeta: bool = False) -> str:
        """What is not usual in a series; if asked, its ζ even where it is."""
        zeta = f"ζ={s.zeta:g}" if s.zeta and (every_zeta or s.zeta != self.zetas.get(s.penalty)) else ""
        return ", ".join(filter(None, (s.variant, zeta)))


def comparisons(all_series: Iterable[Series]) -> list[Comparison]:
    """A comparison for each data set, model and headline; the series are in the paper's order."""
    made = []
    known = list(all_series)
    kinds = Counter(dataset for dataset, _ in {(s.dataset, s.headline) for s in known})
    for (dataset, headline, model), group in groupby(known, lambda s: (s.dataset, s.headline, s.model)):
        members = list(group)
        usual: dict[str, Counter[float]] = {}
        for s in members:
            if s.penalty and not s.variant:
                usual.setdefault(s.penalty, Counter())[s.zeta] += len(s.runs)
        frequent = {p: sorted(z for z, n in count.items() if n == max(count.values())) for p, count in usual.items()}
        if dataset in ZETA:
            frequent[MAN] = [ZETA[dataset]]
        zetas = {penalty: known[0] for penalty, known in frequent.items()}
        ties = {penalty: known for penalty, known in frequent.items() if len(known) > 1}
        main = [s for s in members if not s.variant and s.zeta in (0, zetas.get(s.penalty))]
        cells = [Cell(s, printed(s)) for s in main]
        others = [s for s in members if s not in main]
        made.append(Comparison(dataset, headline, zetas, cells, others, kinds[dataset] == 1, model, ties))
    return made


def printed(s: Series, partition: str | None = None) -> Target | None:
    """The paper's figures for a series, or for its method on another partition; None where the paper has none."""
    if not s.papers_method or s.model or s.headline != Headline():
        return None
    return paper.target(s.dataset, partition or s.partition, s.algorithm, bool(s.penalty))


def penalties_title(penalties: Iterable[str]) -> str:
    """These penalties in a word."""
    titles = [part_title("penalty", penalty) for penalty in penalties]
    return titles[0] if len(titles) == 1 else "a penalty" if titles else part_title("penalty", MAN)


def headers_swapped(cell: Cell) -> Cell:
    """The cell beside the paper's figures with its two Dirichlet headers exchanged."""
    s = cell.series
    return Cell(s, printed(s, paper.SWAPPED.get(s.partition)))
