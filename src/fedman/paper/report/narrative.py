"""The report in words: what was measured, what it says, what is missing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedman.paper import targets as paper
from fedman.paper.presets import METHODS
from fedman.paper.report.compare import ABOVE, BELOW, POINT, STD, Board, Cell, Pair, swapped
from fedman.paper.report.hessian import Measured, drops
from fedman.paper.report.series import Series, method_title
from fedman.paper.report.tables import points, seeds

TABLES = ("cifar100", "tiny-imagenet", "cifar10")


def about(board: Board) -> list[str]:
    """A few sentences on one data set."""
    said = [_measured(board)]
    if board.pairs:
        said.append(_gain(board))
    compared = [cell for cell in board.cells if cell.target]
    if compared:
        said.append(_agreement(compared))
        said += _exchanged(board)
        said += _order(board)
    counted = [cell for cell in compared if cell.rounds_agree is not None]
    if counted:
        good = sum(bool(cell.rounds_agree) for cell in counted)
        said.append(
            f"Rounds to {counted[0].series.target:g} % agree in {good} of {len(counted)} cells "
            "(at most 20 % more than the paper's, or not reached in either)."
        )
    return said


def flatness(measured: Sequence[Measured]) -> list[str]:
    """What MAN does to the Hessian."""
    said = []
    for name, what in (("top", "largest eigenvalue"), ("trace", "trace")):
        pairs = [(a.figure(name), b.figure(name)) for a, b in drops(measured)]
        falls = [1 - man / plain for plain, man in pairs if plain > 0 and not math.isnan(man)]
        if falls:
            lower = sum(fall > 0 for fall in falls)
            change = " to ".join(dict.fromkeys(points(-100 * fall, 0) for fall in (min(falls), max(falls))))
            said.append(f"MAN lowers the Hessian's {what} in {lower} of {len(falls)} pairs ({change} %).")
    return said


def missing(boards: Sequence[Board], measured: Sequence[Measured]) -> list[str]:
    """Cells of the paper's tables that nothing was run for; nothing is said where no table was begun."""
    if not any(board.printed for board in boards):
        return []
    said = []
    have = {(b.dataset, c.series.partition, c.series.algorithm, c.series.man) for b in boards for c in b.cells}
    for dataset in TABLES:
        gaps = [
            method_title(a, man)
            for a in METHODS
            for man in (False, True)
            for p in paper.PARTITIONS
            if (dataset, p, a, man) not in have
        ]
        total = len(METHODS) * 2 * len(paper.PARTITIONS)
        if len(gaps) == total:
            said.append(f"{paper.title(dataset)}: all of its {total} cells.")
        elif gaps:
            names = ", ".join(f"{name} ({count})" for name, count in Counter(gaps).items())
            said.append(f"{paper.title(dataset)}: {len(gaps)} of {total} cells: {names}.")
    if not measured:
        said.append("The Hessian.")
    return said


def tiles(boards: Sequence[Board]) -> list[tuple[str, str]]:
    """The few figures to read first."""
    pairs = [pair for board in boards for pair in board.pairs if not math.isnan(pair.gain)]
    cells = [cell for board in boards for cell in board.cells]
    compared = [cell for cell in cells if cell.target]
    made = [(str(sum(len(s.runs) for board in boards for s in _all(board))), "runs")]
    if pairs:
        made.append((f"{sum(pair.gain > 0 for pair in pairs)} of {len(pairs)}", "pairs in which MAN gains"))
        made.append((points(float(np.median([pair.gain for pair in pairs]))), "points, the median gain"))
    if compared:
        good = sum(cell.mark in (STD, POINT, ABOVE) for cell in compared)
        made.append((f"{good} of {len(compared)}", "cells within a point of the paper, or above"))
    else:
        finite = [cell.series for cell in cells if not math.isnan(cell.series.mean)]
        made += [(f"{best.mean:.1f} %", f"the best: {best.method}") for best in sorted(finite, key=_mean)[-1:]]
    return made


def _mean(s: Series) -> float:
    return s.mean


def _all(board: Board) -> list[Series]:
    return [*(cell.series for cell in board.cells), *board.others]


def _measured(board: Board) -> str:
    if not board.cells:
        return "No run in the usual setting."
    cells = "cell" if len(board.cells) == 1 else "cells"
    text = f"{len(board.cells)} {cells}, {seeds(board)} each, ζ = {board.zeta:g}."
    diverged = [cell.series.method for cell in board.cells if math.isnan(cell.series.mean)]
    return f"{text} Diverged: {', '.join(diverged)}." if diverged else text


def _gain(board: Board) -> str:
    pairs = [pair for pair in board.pairs if not math.isnan(pair.gain)]
    if not pairs:
        return "No pair of plain and MAN is finite."
    low, high = min(pairs, key=lambda p: p.gain), max(pairs, key=lambda p: p.gain)
    up = sum(pair.gain > 0 for pair in pairs)
    if len(pairs) == 1:
        return f"MAN changes the accuracy of {_where(low)} by {points(low.gain)} points."
    text = (
        f"MAN raises the accuracy in {up} of {len(pairs)} pairs; the change is {points(low.gain)} ({_where(low)}) to "
        f"{points(high.gain)} points ({_where(high)})"
    )
    theirs = [gain for pair in pairs if (gain := pair.printed_gain) is not None]
    return f"{text}; in the paper {points(min(theirs))} to {points(max(theirs))}." if theirs else f"{text}."


def _where(pair: Pair) -> str:
    s = pair.plain.series
    return f"{s.method}, {paper.partition_title(s.partition)}"


def _agreement(compared: Sequence[Cell]) -> str:
    marks = Counter(cell.mark for cell in compared)
    text = (
        f"Of {len(compared)} means {marks[STD]} lie within the paper's standard deviation, {marks[POINT]} more within "
        f"a point of its mean, {marks[ABOVE]} above that and {marks[BELOW]} below."
    )
    known = [cell for cell in compared if cell.difference is not None]
    worst = min(known, key=lambda c: c.difference or 0) if known else None
    if worst is not None and (worst.difference or 0) < 0:
        where = f"{worst.series.method}, {paper.partition_title(worst.series.partition)}"
        text += f" The largest shortfall is {points(worst.difference)} ({where})."
    return text


def _exchanged(board: Board) -> list[str]:
    """How near the paper's CIFAR-10 table is in either reading of its two Dirichlet columns."""
    cells = [cell for cell in board.cells if board.dataset == "cifar10" and cell.series.partition != "iid"]
    readings = [cells, [Cell(cell.series, swapped(cell)) for cell in cells]]
    distances = [[abs(c.difference) for c in reading if c.difference is not None] for reading in readings]
    if not all(distances):
        return []
    printed, exchanged = (f"{np.mean(d):.2f}" for d in distances)
    low = sum(cell.mark == BELOW for cell in readings[1])
    return [
        f"The Dirichlet cells are {printed} points from the paper's on average as printed, {exchanged} with its two "
        f"Dirichlet headers exchanged; then {low} of {len(cells)} are more than a point below."
    ]


def _order(board: Board) -> list[str]:
    """Rank correlation of the methods with the paper's, a partition each, where all twelve are there."""
    found = []
    for partition in board.partitions:
        cells = [cell for cell in board.of(partition) if cell.target and not math.isnan(cell.series.mean)]
        if len(cells) == 2 * len(METHODS):
            ours = _rank([cell.series.mean for cell in cells])
            theirs = _rank([cell.target.accuracy for cell in cells if cell.target])
            found.append(f"{np.corrcoef(ours, theirs)[0, 1]:.2f} ({paper.partition_title(partition)})")
    return [f"Rank correlation of the twelve methods with the paper's order: {', '.join(found)}."] if found else []


def _rank(values: Sequence[float]) -> np.ndarray:
    """Ranks, ties sharing their mean: what Spearman's coefficient is the correlation of."""
    v = np.asarray(values)
    return np.array([(v < x).sum() + ((v == x).sum() + 1) / 2 for x in v])
