"""The pictures of accuracy: plain against MAN at a glance, convergence, sensitivity to ζ, partitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from fedman.paper import targets as paper
from fedman.paper.report.compare import Board, Cell
from fedman.paper.report.figure import INK, MUTED, PAPER, Picture, colour, finish, panel
from fedman.paper.report.series import Series, method_order, method_title
from fedman.paper.report.tables import slug

FAMILIES = (("fedavg", "feddyn", "feddc"), ("fedsam", "fedasam", "fedspeed"))
"""Panels hold few enough curves to be read in print: the paper's Figures 2 and 3, and its supplement's."""
BINS = 5
EARLY = 0.07  # of the rounds: what is lower by then is cut off, so that the rest is seen


def overview(board: Board) -> list[Picture]:
    """For each partition: every algorithm's way from plain to MAN, the paper's in grey below it."""
    span = [v for c in board.cells for v in (c.series.mean, c.target.accuracy if c.target else c.series.mean)]
    span = [v for v in span if np.isfinite(v)]
    algorithms = sorted({c.series.algorithm for c in board.cells}, key=method_order)
    pictures = []
    for partition in board.partitions if span else []:
        figure, axes = panel(height=0.85 + 0.36 * len(algorithms))
        axes.set_position((0.17, axes.get_position().y0, 0.80, axes.get_position().height))
        points = []
        for row, algorithm in enumerate(algorithms):
            cells = {c.series.man: c for c in board.of(partition) if c.series.algorithm == algorithm}
            points += _way(axes, row, cells, algorithm)
        axes.set(
            title=paper.partition_title(partition),
            xlabel="test accuracy, %",
            xlim=(min(span) - 1.5, max(span) + 1.5),
            ylim=(len(algorithms) - 0.4, -0.6),
            yticks=range(len(algorithms)),
            yticklabels=[method_title(a, False) for a in algorithms],
        )
        axes.xaxis.set_major_locator(MaxNLocator(BINS, integer=True))
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", colors=INK)
        title = f"{board.title}, {paper.partition_title(partition)}: plain and with MAN"
        name = f"{slug(board.dataset)}-{slug(partition)}-overview"
        pictures.append(finish(name, title, figure, {"points": points}))
    return pictures


def _way(axes: Any, row: int, cells: dict[bool, Cell], algorithm: str) -> list[list[Any]]:
    """Two dots and the line between them, ours above and the paper's below; the dots' texts."""
    points = []
    ours = {man: c.series.mean for man, c in cells.items() if np.isfinite(c.series.mean)}
    theirs = {man: c.target.accuracy for man, c in cells.items() if c.target}
    tone = colour(algorithm)
    for values, y, shade, size in ((ours, row - 0.1 * bool(theirs), tone, 5.5), (theirs, row + 0.22, MUTED, 3)):
        if len(values) == 2:
            axes.plot(list(values.values()), [y, y], color=shade, linewidth=size / 3.2, alpha=0.55)
        for man, value in values.items():
            fill = shade if man else PAPER
            axes.plot(value, y, "o", markersize=size, markerfacecolor=fill, markeredgecolor=shade, markeredgewidth=1.1)
            whose = "" if values is ours else "paper: "
            points.append([value, y, f"{whose}{method_title(algorithm, man)} {value:.2f} %"])
    return points


def convergence(board: Board) -> list[list[Picture]]:
    """A row of panels for each family of algorithms, a panel a partition: mean over seeds, band from low to high."""
    present = [c.series for c in board.cells if c.series.curve is not None]
    names = {s.algorithm for s in present}
    families = [[a for a in family if a in names] for family in FAMILIES] if len(names) > 3 else []
    rest = sorted(names - {a for family in families for a in family}, key=method_order)
    rows = []
    for number, family in enumerate([*filter(None, families), *([rest] if rest else [])], 1):
        row = [
            _panel(board, [s for s in present if s.partition == p and s.algorithm in family], p, number)
            for p in board.partitions
            if any(s.partition == p and s.algorithm in family for s in present)
        ]
        rows.append(row)
    return rows


def _panel(board: Board, members: Sequence[Series], partition: str, number: int) -> Picture:
    figure, axes = panel()
    lines, top, start = [], 0.0, 100.0
    for s in members:
        curve, tone = s.curve, colour(s.algorithm)
        assert curve is not None
        gid = group_id(s.algorithm, s.man)
        style: dict[str, Any] = {"linewidth": 1.5} if s.man else {"linewidth": 1.1, "linestyle": (0, (4, 2))}
        axes.plot(curve.rounds, curve.mean, color=tone, label=s.method, gid=gid, **style)
        if len(s.runs) > 1:
            axes.fill_between(curve.rounds, curve.low, curve.high, color=tone, alpha=0.18, linewidth=0, gid=gid)
        top = max(top, float(curve.high.max()))
        start = min(start, float(np.interp(EARLY * s.length, curve.rounds, curve.mean)))
        lines.append(line(s.method, s.algorithm, s.man, curve.rounds, curve.mean, 4))
    goal = members[0].target
    if goal:
        axes.axhline(goal, color=MUTED, linewidth=0.7, linestyle=(0, (1, 2)))
    axes.set(
        title=f"{paper.partition_title(partition)}",
        xlabel="round",
        ylabel="test accuracy, %",
        xlim=(0, members[0].length),
        ylim=(max(0.0, start - 0.05 * top), 1.03 * top),
    )
    axes.yaxis.set_major_locator(MaxNLocator(BINS))
    axes.legend(loc="lower right").set_gid("legend")
    title = f"{board.title}, {paper.partition_title(partition)}: accuracy over the rounds"
    name = f"{slug(board.dataset)}-{slug(partition)}-curves-{number}"
    return finish(name, title, figure, {"lines": lines, "x": "round"})


def sensitivity(board: Board) -> list[Picture]:
    """Accuracy against ζ; the plain algorithm as a dashed line, the paper's value and its claimed range as shades."""
    pictures = []
    for study in board.zeta_series():
        figure, axes = panel(6.2, 3.1)
        first, tone = study[0], colour(study[0].algorithm)
        finite = [s for s in study if not math.isnan(s.mean)]
        with_man, plain = [s for s in finite if s.man], [s for s in finite if not s.man]
        if not with_man:
            continue
        zetas, means = [s.zeta for s in with_man], [s.mean for s in with_man]
        axes.set_xscale("log")
        target = paper.target(first.dataset, first.partition, first.algorithm, True)
        if target:
            axes.axvspan(0.1, 1.5, color=MUTED, alpha=0.08, linewidth=0)
            axes.axhline(target.accuracy, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)), label="paper, ζ = 0.15")
        spread = [s.std or 0 for s in with_man]
        axes.errorbar(zetas, means, spread, color=tone, linewidth=1.5, marker="o", markersize=4, elinewidth=1,
                      label=with_man[0].method)  # fmt: skip
        for s in plain:
            axes.axhline(s.mean, color=tone, linewidth=1.1, linestyle=(0, (4, 2)), label=s.method)
        where = f"{board.title}, {paper.partition_title(first.partition)}"
        axes.set(title=where, xlabel="ζ", ylabel="test accuracy, %", xticks=zetas)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.tick_params(axis="x", which="minor", bottom=False)
        axes.legend(loc="best")
        points = [[z, m, f"ζ = {z:g}: {m:.2f} %"] for z, m in zip(zetas, means, strict=True)]
        name = f"{slug(board.dataset)}-{slug(first.partition)}-{slug(first.algorithm)}-zeta"
        pictures.append(finish(name, f"{board.title}: accuracy against ζ", figure, {"points": points}))
    return pictures


def partition(dataset: str, name: str, counts: np.ndarray, facts: dict[str, float], most: int) -> Picture:
    """Samples of each class (row) at each client (column); the darkest shade stands for `most`."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    clients, classes = counts.shape
    figure, axes = panel()
    tone = colour("fedavg")
    shades = LinearSegmentedColormap.from_list("clients", [(0, f"{tone}18"), (0.5, f"{tone}a0"), (1, f"{tone}ff")])
    shown = np.ma.masked_equal(counts.T, 0)
    axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=shades, norm=PowerNorm(0.5, 0, most))
    axes.grid(visible=False)
    axes.locator_params(integer=True)
    axes.set(
        title=f"{paper.partition_title(name)}: {facts['classes']:.0f} classes a client", xlabel="client", ylabel="class"
    )
    title = f"{paper.title(dataset)}, {paper.partition_title(name)}: {clients} clients, {classes} classes"
    hover = {"grid": counts.T.tolist(), "rows": [0, classes - 1], "columns": [0, clients - 1], "value": "samples",
             "names": ["client", "class"]}  # fmt: skip
    return finish(f"{slug(dataset)}-{slug(name)}-partition", title, figure, hover)


def line(label: str, algorithm: str, man: bool, x: np.ndarray, y: np.ndarray, digits: int) -> dict[str, Any]:
    """A curve for the pointer: what it is called, whose colour it has, its points to so many digits."""
    series = group_id(algorithm, man).removeprefix("series:").replace(":", " ")
    return {"label": label, "series": series, "x": [round(float(v), 3) for v in x],
            "y": [float(f"{float(v):.{digits}g}") for v in y]}  # fmt: skip


def group_id(algorithm: str, man: bool) -> str:
    """What the buttons know a curve by."""
    return f"series:{slug(algorithm)}:{'man' if man else 'plain'}"
