"""Figures of accuracy: plain against MAN, convergence, sensitivity to ζ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from fedman.paper import targets as paper
from fedman.paper.report.compare import Cell, Comparison
from fedman.paper.report.figure import INK, MUTED, SHEET, Picture, colour, draw_curve, finish, panel
from fedman.paper.report.series import Series, method_order, method_title, slug

FAMILIES = (("fedavg", "feddyn", "feddc"), ("fedsam", "fedasam", "fedspeed"))
"""Algorithms that share a panel, so that it has few enough curves to be read in print; as in the paper's figures."""
BINS = 5
EARLY = 0.07  # share of the rounds whose steep rise is cut off


def overview(data: Comparison) -> list[Picture]:
    """For each partition: every algorithm without and with MAN, joined by a line; the paper's in grey below."""
    span = [v for c in data.cells for v in (c.series.mean, c.target.accuracy if c.target else c.series.mean)]
    span = [v for v in span if np.isfinite(v)]
    algorithms = sorted({c.series.algorithm for c in data.cells}, key=method_order)
    pictures = []
    for partition in data.partitions if span else []:
        figure, axes = panel(height=0.85 + 0.36 * len(algorithms))
        axes.set_position((0.17, axes.get_position().y0, 0.80, axes.get_position().height))
        points = []
        for row, algorithm in enumerate(algorithms):
            cells = {c.series.man: c for c in data.of(partition) if c.series.algorithm == algorithm}
            points += _plain_to_man(axes, row, cells, algorithm)
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
        title = f"{data.title}, {paper.partition_title(partition)}: plain and with MAN"
        name = f"{slug(data.dataset)}-{slug(partition)}-overview"
        pictures.append(finish(name, title, figure, {"points": points}))
    return pictures


def _plain_to_man(axes: Any, row: int, cells: dict[bool, Cell], algorithm: str) -> list[tuple[float, float, str]]:
    """Two dots and the line between them, ours above and the paper's below; the dots for the pointer."""
    points = []
    ours = {man: c.series.mean for man, c in cells.items() if np.isfinite(c.series.mean)}
    theirs = {man: c.target.accuracy for man, c in cells.items() if c.target}
    tone = colour(algorithm)
    for values, y, shade, size in ((ours, row - 0.1 * bool(theirs), tone, 5.5), (theirs, row + 0.22, MUTED, 3)):
        if len(values) == 2:
            axes.plot(list(values.values()), [y, y], color=shade, linewidth=size / 3.2, alpha=0.55)
        for man, value in values.items():
            fill = shade if man else SHEET
            axes.plot(value, y, "o", markersize=size, markerfacecolor=fill, markeredgecolor=shade, markeredgewidth=1.1)
            whose = "" if values is ours else "paper: "
            points.append((value, y, f"{whose}{method_title(algorithm, man)} {value:.2f} %"))
    return points


def convergence(data: Comparison) -> list[Picture]:
    """For each family of algorithms a panel for each partition: mean over seeds, band from lowest to highest."""
    present = [c.series for c in data.cells if c.series.curve is not None]
    names = {s.algorithm for s in present}
    families = [names.intersection(family) for family in FAMILIES] if len(names) > 3 else []
    families.append(names.difference(*families))
    pictures = []
    for number, family in enumerate(filter(None, families), 1):
        for partition in data.partitions:
            members = [s for s in present if s.partition == partition and s.algorithm in family]
            if members:
                pictures.append(_panel(data, members, partition, number))
    return pictures


def _panel(data: Comparison, members: Sequence[Series], partition: str, number: int) -> Picture:
    figure, axes = panel()
    top, start = 0.0, 100.0
    for s in members:
        curve = s.curve
        assert curve is not None
        band = (curve.low, curve.high) if len(s.runs) > 1 else ()
        draw_curve(axes, s, curve.rounds, curve.mean, band=band)
        top = max(top, float(curve.high.max()))
        start = min(start, float(np.interp(EARLY * s.length, curve.rounds, curve.mean)))
    goal = members[0].target
    if goal:
        axes.axhline(goal, color=MUTED, linewidth=0.7, linestyle=(0, (1, 2)))
    axes.set(
        title=paper.partition_title(partition),
        xlabel="round",
        ylabel="test accuracy, %",
        xlim=(0, members[0].length),
        ylim=(max(0.0, start - 0.05 * top), 1.03 * top),
    )
    axes.yaxis.set_major_locator(MaxNLocator(BINS))
    axes.legend(loc="lower right").set_gid("legend")
    title = f"{data.title}, {paper.partition_title(partition)}: accuracy over the rounds"
    return finish(f"{slug(data.dataset)}-{slug(partition)}-curves-{number}", title, figure)


def sensitivity(data: Comparison) -> list[Picture]:
    """Accuracy against ζ; dashed the plain algorithm, dotted the paper's value, shaded the range it calls stable."""
    pictures = []
    for study in data.zeta_studies():
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
        where = f"{data.title}, {paper.partition_title(first.partition)}"
        axes.set(title=where, xlabel="ζ", ylabel="test accuracy, %", xticks=zetas)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.tick_params(axis="x", which="minor", bottom=False)
        axes.legend(loc="best")
        points = [(z, m, f"ζ = {z:g}: {m:.2f} %") for z, m in zip(zetas, means, strict=True)]
        name = f"{slug(data.dataset)}-{slug(first.partition)}-{slug(first.algorithm)}-zeta"
        pictures.append(finish(name, f"{data.title}: accuracy against ζ", figure, {"points": points}))
    return pictures
