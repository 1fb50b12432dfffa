"""Figures of flatness: the largest eigenvalues, densities, loss landscapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, StrMethodFormatter

from fedman.flatness import plot
from fedman.flatness.landscape import Landscape
from fedman.paper import targets as paper
from fedman.paper.flatness import figures
from fedman.paper.flatness.flatness_json import Measurements
from fedman.paper.report.figure import Picture, draw_curve, finish, panel
from fedman.paper.report.hessian import Measured, by_place, by_setting, comparable
from fedman.paper.report.series import penalties_of, slug

FLOOR = 1e-7  # of a density, on its logarithmic scale
MOST = 6  # landscapes of a partition; of more those of FedAvg are drawn, as in the paper
SMOOTH = 0.005  # width of a density's Gaussians, as a share of the largest eigenvalue drawn


def by_partition(measured: Sequence[Measured]) -> list[list[Measured]]:
    """The runs whose measurements are drawn together: one seed of each usual setting, the smallest."""
    usual = [m for m in measured if not m.variant]
    return by_place(seeds[0] for seeds in by_setting(usual))


def spectrum(members: Sequence[Measured]) -> list[Picture]:
    """The largest eigenvalues against their rank."""

    def positive(m: Measurements) -> list[float]:
        values = [v for v in m["top"]["values"] if v is not None and v > 0]  # the scale is logarithmic
        return values if len(values) > 1 else []

    shown, count = comparable(members, "top", positive)
    if not shown:
        return []
    figure, axes = panel(6.2, 3.4)
    for m, values in shown.items():
        ranks = np.arange(1, len(values) + 1)
        draw_curve(axes, m, ranks, np.array(values), penalties_of(shown), width=1.4)
    axes.set(title=_title(members, count), xlabel="rank", ylabel="eigenvalue", yscale="log", xlim=(1, None))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="upper right", ncols=2).set_gid("legend")
    title = f"{members[0].place}: the largest eigenvalues of the Hessian"
    return [finish(f"{members[0].place_slug}-top-eigenvalues", title, figure)]


def density(members: Sequence[Measured]) -> list[Picture]:
    """The smoothed density of all eigenvalues."""
    shown, count = comparable(members, "density", lambda m: [d] if (d := figures.density(m)) else [])
    if not shown:
        return []
    figure, axes = panel(6.2, 3.4)
    low, high = min(d.span[0] for (d,) in shown.values()), max(d.span[1] for (d,) in shown.values())
    sigma = SMOOTH * max(high, -low) or 1.0
    grid = torch.linspace(low - 4 * sigma, high + 4 * sigma, 600, dtype=torch.float64)
    for m, (found,) in shown.items():
        mean = np.maximum(found.curve(sigma, grid=grid).mean.numpy(), FLOOR)
        draw_curve(axes, m, grid.numpy(), mean, penalties_of(shown), width=1.1)
    axes.set(title=_title(members, count), xlabel="eigenvalue", ylabel="density", yscale="log", ylim=(FLOOR, None))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))
    axes.legend(loc="upper right", ncols=2).set_gid("legend")
    title = f"{members[0].place}: density of the Hessian's eigenvalues"
    return [finish(f"{members[0].place_slug}-density", title, figure)]


def landscapes(members: Sequence[Measured]) -> list[Picture]:
    """A surface and a map of the loss around each model, on one scale."""

    def plane(m: Measurements) -> list[Landscape]:
        found = figures.landscape(m, axes=2)
        return [found] if found is not None and found.losses.isfinite().any() else []

    shown, _ = comparable(members, "landscape", plane)
    if not shown:
        return []
    if len(shown) > MOST:
        shown = {m: found for m, found in shown.items() if m.algorithm == "fedavg"} or shown
    levels = plot.shared_levels([found for (found,) in shown.values()], 18)
    made = []
    for kind, what, draw in (("surface", "loss surface", _surface), ("map", "map of the loss", _map)):
        for m, (found,) in shown.items():
            figure, hover = draw(found, levels)
            figure.axes[0].set(title=f"{m.method}, {paper.partition_title(m.partition)}")
            name = f"{members[0].place_slug}-{slug(m.algorithm)}-{slug(m.penalty) if m.penalty else 'plain'}-{kind}"
            made.append(finish(name, f"{m.method}, {members[0].place}: {what}", figure, hover))
    return made


def _surface(found: Landscape, levels: np.ndarray) -> tuple[Figure, None]:
    figure, axes = panel(4.1, 3.6, projection="3d")
    axes.set_position((0.0, 0.04, 0.94, 0.9))
    plot.draw_surface(axes, found, levels)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_pane_color((1, 1, 1, 0))
    return figure, None


def _map(found: Landscape, levels: np.ndarray) -> tuple[Figure, dict[str, object]]:
    figure, axes = panel(4.1, 3.6)
    plot.draw_map(axes, found, levels)
    axes.grid(visible=False)
    ends = float(found.offsets.min()), float(found.offsets.max())
    losses = plot.drawn_losses(found, levels)
    names = [axes.get_xlabel(), axes.get_ylabel()]
    grid = losses.T.round(3).tolist()
    return figure, {"grid": grid, "rows": ends, "columns": ends, "axes": names, "value": "loss"}


def _title(members: Sequence[Measured], count: int) -> str:
    return f"{members[0].place}, {count} samples" if count else members[0].place


def _power(value: float) -> str:
    """A power of ten as text: 10⁻³."""
    return "10" + str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
