"""Figures of the headline: plain against penalised, convergence, the clients, sensitivity to ζ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter

from fedman.paper import targets as paper
from fedman.paper.report.compare import Cell, Comparison, printed
from fedman.paper.report.figure import INK, MUTED, SHEET, Picture, colour, draw_curve, finish, panel
from fedman.paper.report.series import MAN, Curve, Series, algorithms_of, method_title, slug
from fedman.runs.records import Headline
from fedman.runs.results import POINTS

FAMILIES = (("fedavg", "feddyn", "feddc"), ("fedsam", "fedasam", "fedspeed"))
"""Algorithms that share a panel, so that it has few enough curves to be read in print; as in the paper's figures."""
MOST = 3  # algorithms in a panel
BINS = 5
EARLY = 0.07  # share of the rounds whose steep rise is cut off


def overview(data: Comparison) -> list[Picture]:
    """For each partition: every algorithm without and with its penalty, joined by a line; the paper's in grey below."""
    span = [v for c in data.cells for v in (c.series.mean, c.target.accuracy if c.target else c.series.mean)]
    span = [v for v in span if np.isfinite(v)]
    rows = _overview_rows(data)
    labels = [method_title(a, p if len(data.penalties) > 1 else "") for a, p in rows]
    labels = [label if len(label) <= 32 else f"{label[:31]}…" for label in labels]
    more = max(0, max(map(len, labels), default=0) - 8)  # the names of the paper's algorithms are that long
    left = 0.17 + 0.012 * more + 0.02 * bool(more)
    pictures = []
    for partition in data.partitions if span else []:
        margin = 1.5 if data.headline.unit else 0.08 * (max(span) - min(span)) or 1.0
        figure, axes = panel(height=0.85 + 0.36 * len(rows))
        axes.set_position((left, axes.get_position().y0, 0.97 - left, axes.get_position().height))
        points = []
        for row, (algorithm, penalty) in enumerate(rows):
            cells = [c for c in data.of(partition) if c.series.algorithm == algorithm]
            pair = {c.series.penalty: c for c in cells if c.series.penalty in ("", penalty)}
            points += _plain_to_penalised(axes, row, pair, data.headline)
        axes.set(
            title=paper.partition_title(partition),
            xlabel=data.headline.title(),
            xlim=(min(span) - margin, max(span) + margin),
            ylim=(len(rows) - 0.4, -0.6),
            yticks=range(len(rows)),
            yticklabels=labels,
        )
        axes.xaxis.set_major_locator(MaxNLocator(BINS, integer=bool(data.headline.unit)))
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", colors=INK)
        named = data.picture_of(partition, "overview", f"plain and with {data.added}")
        pictures.append(finish(*named, figure, {"points": points}))
    return pictures


def _overview_rows(data: Comparison) -> list[tuple[str, str]]:
    """An algorithm and a penalty on each row; one that was run without any has a row too."""
    algorithms = algorithms_of(c.series for c in data.cells)
    run = {(c.series.algorithm, c.series.penalty) for c in data.cells}
    return [(a, p) for a in algorithms for p in [p for p in data.penalties if (a, p) in run] or [""]]


def _plain_to_penalised(
    axes: Any, row: int, cells: dict[str, Cell], headline: Headline
) -> list[tuple[float, float, str]]:
    """Two dots and the line between them, ours above and the paper's below; the dots for the pointer."""
    points = []
    methods = {penalty: c.series.method for penalty, c in cells.items()}
    ours = {penalty: c.series.mean for penalty, c in cells.items() if np.isfinite(c.series.mean)}
    theirs = {penalty: c.target.accuracy for penalty, c in cells.items() if c.target}
    tone = next((colour(c.series.algorithm) for c in cells.values()), MUTED)
    for values, y, shade, size in ((ours, row - 0.1 * bool(theirs), tone, 5.5), (theirs, row + 0.22, MUTED, 3)):
        if len(values) == 2:
            axes.plot(list(values.values()), [y, y], color=shade, linewidth=size / 3.2, alpha=0.55)
        for penalty, value in values.items():
            fill = shade if penalty else SHEET
            axes.plot(value, y, "o", markersize=size, markerfacecolor=fill, markeredgecolor=shade, markeredgewidth=1.1)
            whose = "" if values is ours else "paper: "
            points.append((value, y, f"{whose}{methods[penalty]} {headline.shown(value)}"))
    return points


def convergence(data: Comparison) -> list[Picture]:
    """For each family of algorithms a panel for each partition: mean over seeds, band from lowest to highest."""
    present = [(c.series, c.series.curve) for c in data.cells if c.series.curve is not None]
    names = {s.algorithm for s, _ in present}
    families = [names.intersection(family) for family in FAMILIES] if len(names) > MOST else []
    others = [name for name in algorithms_of(s for s, _ in present) if not any(name in family for family in families)]
    families += [{*others[i : i + MOST]} for i in range(0, len(others), MOST)]
    pictures = []
    for number, family in enumerate(filter(None, families), 1):
        for partition in data.partitions:
            drawn = [(s, curve) for s, curve in present if s.partition == partition and s.algorithm in family]
            if not drawn:
                continue
            figure, axes = panel()
            for s, curve in drawn:
                band = (curve.low, curve.high) if len(s.runs) > 1 else ()
                draw_curve(axes, s, curve.rounds, curve.mean, data.penalties, band=band)
            first, _ = drawn[0]
            if data.target:
                axes.axhline(data.target, color=MUTED, linewidth=0.7, linestyle=(0, (1, 2)))
            axes.set(xlim=(0, first.length), ylim=_limits(drawn, data.headline))
            _label(axes, data, partition, "round")
            named = data.picture_of(partition, f"curves-{number}", f"{data.headline.name} over the rounds")
            pictures.append(finish(*named, figure))
    return pictures


def _label(axes: Any, data: Comparison, partition: str, x: str) -> None:
    """Title, axes and legend of a panel in which the headline is drawn against `x`."""
    axes.set(title=paper.partition_title(partition), xlabel=x, ylabel=data.headline.title())
    axes.xaxis.set_major_locator(MaxNLocator(BINS, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(BINS))
    axes.legend(loc=f"{'upper' if data.headline.lower_is_better else 'lower'} right").set_gid("legend")


def _limits(drawn: Sequence[tuple[Series, Curve]], headline: Headline) -> tuple[float, float]:
    """Of the headline's axis: the steep beginning is cut off, and a percentage is not negative."""
    first = [float(np.interp(EARLY * s.length, curve.rounds, curve.mean)) for s, curve in drawn]
    if headline.lower_is_better:
        bottom = min(float(curve.low.min()) for _, curve in drawn)
        margin = 0.05 * (max(first) - bottom) or 1.0
        return bottom - margin, max(first) + margin
    top = max(float(curve.high.max()) for _, curve in drawn)
    if headline.unit:
        return max(0.0, min(100.0, *first) - 0.05 * max(0.0, top)), 1.03 * max(0.0, top)
    margin = 0.05 * (top - min(first)) or 1.0
    return min(first) - margin, top + margin


def clients(data: Comparison) -> list[Picture]:
    """For each partition: the headline of every client on its own test samples, sorted, a line for each method.

    Over several seeds it is the mean of the worst client's, of the second worst's, and so on.
    """
    pictures = []
    for partition in data.partitions:
        members = {c.series: found for c in data.of(partition) if (found := _sorted_clients(c.series))}
        if not members:
            continue
        figure, axes = panel()
        for s, values in members.items():
            shown = np.unique(np.linspace(0, len(values) - 1, POINTS).round().astype(int))
            draw_curve(axes, s, 1 + shown, np.array(values)[shown], data.penalties)
        _label(axes, data, partition, "clients, worst first")
        pictures.append(finish(*data.picture_of(partition, "clients", f"{data.headline.name} of each client"), figure))
    return pictures


def _sorted_clients(s: Series) -> list[float]:
    """The values of the clients from the worst to the best, the mean over seeds; none where they are not known."""
    each = [sorted(values, reverse=s.headline.lower_is_better) for c in s.clients if (values := c.get("each"))]
    same = [values for values in each if len(values) == len(each[0])]
    return np.mean(same, axis=0).tolist() if same else []


def sensitivity(data: Comparison) -> list[Picture]:
    """The headline against ζ; dashed plain, dotted the paper's value, shaded the range that it calls stable."""
    pictures = []
    for study in data.zeta_studies():
        finite = [s for s in study if not math.isnan(s.mean)]
        penalised, plain = [s for s in finite if s.penalty], [s for s in finite if not s.penalty]
        if not penalised:
            continue
        figure, axes = panel(6.2, 3.1)
        first, tone = penalised[0], colour(penalised[0].algorithm)
        zetas, means = [s.zeta for s in penalised], [s.mean for s in penalised]
        axes.set_xscale("log")
        if target := printed(first):
            axes.axvspan(0.1, 1.5, color=MUTED, alpha=0.08, linewidth=0)
            axes.axhline(target.accuracy, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)), label="paper, ζ = 0.15")
        spread = [s.std or 0 for s in penalised]
        axes.errorbar(zetas, means, spread, color=tone, linewidth=1.5, marker="o", markersize=4, elinewidth=1,
                      label=first.method)  # fmt: skip
        for s in plain:
            axes.axhline(s.mean, color=tone, linewidth=1.1, linestyle=(0, (4, 2)), label=s.method)
        where = f"{data.title}, {paper.partition_title(first.partition)}"
        axes.set(title=where, xlabel="ζ", ylabel=data.headline.title(), xticks=zetas)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", which="minor", bottom=False)
        axes.legend(loc="best")
        points = [(z, m, f"ζ = {z:g}: {data.headline.shown(m)}") for z, m in zip(zetas, means, strict=True)]
        method = first.algorithm if first.penalty == MAN else f"{first.algorithm}-{first.penalty}"
        name = f"{data.name}-{slug(first.partition)}-{slug(method)}-zeta"
        title = f"{data.title}: {data.headline.name} against ζ"
        pictures.append(finish(name, title, figure, {"points": points}))
    return pictures
