"""The report's tables: text in, text out, for the page, for CSV and for Markdown alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedman.paper import targets as paper
from fedman.paper.report.compare import BELOW, MARKS, STD, Board, Cell, swapped
from fedman.paper.report.series import Series
from fedman.paper.targets import Target
from fedman.runs.text_tables import comma_separated, markdown, mean_std

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """A table with a name for its files, a title and a note for its readers."""

    name: str
    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    words: int = 1  # the first so many columns are words, the others figures
    tones: dict[tuple[int, int], str] = field(default_factory=dict)  # marks of cells by row and column

    def markdown(self) -> str:
        return f"**{self.title}**\n\n{markdown(self.header, self.rows)}" + (f"\n{self.note}\n" if self.note else "")

    def csv(self) -> str:
        """For programs: nothing where there is nothing, and a minus that they know."""
        plain = [["" if cell == NOTHING else cell.replace("−", "-") for cell in row] for row in self.rows]
        return comma_separated(self.header, plain)


def accuracy(board: Board) -> Table:
    """Every cell of a data set, one a line, every figure in a column of its own."""
    header = ["partition", "method", "accuracy", "std", "seeds", "rounds to target"]
    header += ["paper", "paper's std", "difference", "agreement", "paper's rounds"] if board.printed else []
    rows = []
    for cell in board.cells:
        s, target = cell.series, cell.target
        mean = "diverged" if math.isnan(s.mean) else f"{s.mean:.2f}"
        spread = NOTHING if s.std is None else f"{s.std:.2f}"
        row = [s.partition, s.method, mean, spread, str(len(s.runs)), reached(s)]
        if board.printed:
            row += [f"{target.accuracy:.2f}", f"{target.std:.2f}"] if target else [NOTHING, NOTHING]
            row += [points(cell.difference), MARKS[cell.mark][1], printed_rounds(cell)]
        rows.append(row)
    note = f"ζ = {board.zeta:g}; percent, of the mean of all clients' last models, over seeds."
    return Table(f"{slug(board.dataset)}-accuracy", f"{board.title}: accuracy", header, rows, note, 2)


def headline(board: Board) -> Table:
    """The paper's own layout: a line a method, a column a partition, the paper's figure in brackets."""
    header = ["method", *(paper.partition_title(p) for p in board.partitions)]
    cells = {(c.series.method, c.series.partition): c for c in board.cells}
    rows = []
    for method in dict.fromkeys(method for method, _ in cells):
        row = [method]
        for partition in board.partitions:
            cell = cells.get((method, partition))
            text = NOTHING if cell is None else mean_std(cell.series.accuracies)
            if cell is not None and cell.target is not None:
                text += f" ({printed(cell.target)}) {MARKS[cell.mark][0]}"
            row.append(text)
        rows.append(row)
    brackets = "; the paper's in brackets" if board.printed else ""
    note = f"ζ = {board.zeta:g}, {seeds(board)}{brackets}. {legend(board)}".strip()
    return Table(f"{slug(board.dataset)}-headline", f"{board.title}, accuracy in %", header, rows, note)


def gains(board: Board) -> Table:
    """What MAN adds to each algorithm, a column a partition."""
    pairs = {(pair.plain.series.method, pair.plain.series.partition): pair for pair in board.pairs}
    header, rows = ["algorithm"], []
    for part in board.partitions:
        header += [paper.partition_title(part), *(["paper"] if board.printed else [])]
    for method in dict.fromkeys(method for method, _ in pairs):
        row = [method]
        for part in board.partitions:
            pair = pairs.get((method, part))
            row.append(points(pair.gain if pair else None))
            row += [points(pair.printed_gain if pair else None)] if board.printed else []
        rows.append(row)
    return Table(f"{slug(board.dataset)}-gain", f"{board.title}: points that MAN adds", header, rows)


def rounds(board: Board) -> Table | None:
    """Rounds to the target, beside the paper's."""
    goal = next((cell.series.target for cell in board.cells), None)
    if goal is None:
        return None
    header = ["method"]
    rows: list[list[str]] = []
    tones: dict[tuple[int, int], str] = {}
    for part in board.partitions:
        header += [paper.partition_title(part), *(["paper", "ratio"] if board.printed else [])]
    cells = {(c.series.method, c.series.partition): c for c in board.cells}
    for method in dict.fromkeys(method for method, _ in cells):
        row = [method]
        for part in board.partitions:
            cell = cells.get((method, part))
            row.append(reached(cell.series) if cell else NOTHING)
            if board.printed:
                ratio = cell.rounds_ratio if cell else None
                row += [printed_rounds(cell) if cell else NOTHING, NOTHING if ratio is None else f"{ratio:.2f}"]
                tones[len(rows), len(row) - 2] = "quiet"
            if cell and cell.rounds_agree is not None:
                tones[len(rows), len(row) - 1] = STD if cell.rounds_agree else BELOW
        rows.append(row)
    note = "Median over seeds of the first round in which the mean of all clients reaches the target."
    if board.printed:
        note += " Green: at most 20 % more than in the paper."
    title = f"{board.title}: rounds to {goal:g} %"
    return Table(f"{slug(board.dataset)}-rounds", title, header, rows, note, tones=tones)


def readings(board: Board) -> Table:
    """CIFAR-10 beside both readings of the paper's columns."""
    header = ["partition", "method", "accuracy %", "as printed", "difference", "headers swapped", "difference"]
    rows: list[list[str]] = []
    tones: dict[tuple[int, int], str] = {}
    for cell in board.cells:
        other = Cell(cell.series, swapped(cell))
        words = [cell.series.partition, cell.series.method, mean_std(cell.series.accuracies)]
        figures = [text for c in (cell, other) for text in (printed(c.target), points(c.difference))]
        tones |= {(len(rows), 4): cell.mark, (len(rows), 6): other.mark}
        rows.append([*words, *figures])
    note = (
        "In all twelve rows of the paper's table the column headed δ = 0.6 is lower than the one headed δ = 0.3, "
        "although it is the easier split: the two headers have probably changed places."
    )
    return Table(f"{slug(board.dataset)}-readings", f"{board.title}: both readings", header, rows, note, 2, tones)


def sensitivity(board: Board) -> Table | None:
    """Accuracy against ζ."""
    rows = [
        [s.partition, s.method, f"{s.zeta:g}", mean_std(s.accuracies), str(len(s.runs)), reached(s)]
        for line in board.zeta_series()
        for s in line
    ]
    goal = next((cell.series.target for cell in board.cells), None)
    header = ["partition", "method", "ζ", "accuracy %", "seeds", f"rounds to {goal:g} %" if goal else "rounds"]
    title = f"{board.title}: accuracy against ζ"
    return Table(f"{slug(board.dataset)}-zeta", title, header, rows, words=2) if rows else None


def variants(board: Board) -> Table | None:
    """Settings on which paper and code disagree, beside the usual setting."""
    header = ["partition", "method", "departs by", "accuracy %", "seeds", "usual setting", "difference"]
    header += ["paper"] if board.printed else []
    rows = []
    for words, s, usual in board.variants():
        change = points(s.mean - usual.series.mean) if usual else NOTHING
        row = [s.partition, s.method, words, mean_std(s.accuracies), str(len(s.runs))]
        row += [mean_std(usual.series.accuracies) if usual else NOTHING, change]
        target = paper.target(s.dataset, s.partition, s.algorithm, s.man)
        rows.append([*row, printed(target)] if board.printed else row)
    title = f"{board.title}: other readings of the paper and its code" if board.printed else f"{board.title}: variants"
    return Table(f"{slug(board.dataset)}-variants", title, header, rows, words=3) if rows else None


def every_run(everything: Sequence[Series]) -> Table:
    """All runs, one a line."""
    header = ["data", "partition", "method", "ζ", "departs by", "seed", "accuracy %", "rounds to target", "s",
              "precision", "device", "version"]  # fmt: skip
    rows = []
    for s in everything:
        for run, value in zip(s.runs, s.accuracies, strict=True):
            first = run.get("rounds_to_target")
            rows.append(
                [s.dataset, s.partition, s.method, f"{s.zeta:g}", s.departs, str(run["config"]["seed"]),
                 mean_std([value]), str(first) if first else NOTHING, _text(run.get("seconds")),
                 _text(run.get("precision")), _text(run.get("device")), _text(run.get("version"))]
            )  # fmt: skip
    return Table("all-runs", "Every run", header, rows, words=3)


def seeds(board: Board) -> str:
    """How many seeds its cells have."""
    low, high = board.seeds
    return ("one seed" if low == 1 else f"{low} seeds") if low == high else f"{low} to {high} seeds"


def legend(board: Board) -> str:
    """What the marks mean."""
    return ", ".join(f"{sign} {words}" for sign, words in MARKS.values() if sign) + "." if board.printed else ""


def printed(target: Target | None) -> str:
    """An accuracy of the paper."""
    return NOTHING if target is None else f"{target.accuracy:.2f} ± {target.std:.2f}"


def printed_rounds(cell: Cell) -> str:
    """Rounds of the paper."""
    if cell.target is None or cell.series.target is None:
        return NOTHING
    return str(cell.target.rounds or "500+")


def points(value: float | None, digits: int = 2) -> str:
    """A difference in points, with its sign."""
    return NOTHING if value is None or math.isnan(value) else f"{value:+.{digits}f}".replace("-", "−")


def reached(s: Series) -> str:
    """The median first round at the target."""
    if s.target is None:
        return NOTHING
    return f"{s.length}+" if math.isinf(s.rounds_to_target) else f"{s.rounds_to_target:g}"


def slug(name: str) -> str:
    """A name that is safe in a file's name."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in name).strip("-.") or "data"


def _text(value: object) -> str:
    return NOTHING if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)
