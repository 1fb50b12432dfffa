"""Figures of flatness: the largest eigenvalues, densities, loss landscapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, StrMethodFormatter

from fedman.flatness.density import Density
from fedman.paper import targets as paper
from fedman.paper.flatness import flatness_json as measurement
from fedman.paper.report.figure import Hover, Picture, draw_curve, finish, panel
from fedman.paper.report.hessian import Measured, samples
from fedman.paper.report.series import slug

FLOOR = 1e-7  # of a density, on its logarithmic scale
SMOOTH = 0.005  # width of a density's Gaussians, as a share of the largest eigenvalue drawn
M = TypeVar("M", bound=measurement.Measurement)
Item = TypeVar("Item")


def by_partition(measured: Sequence[Measured]) -> list[list[Measured]]:
    """The runs whose measurements are drawn together: one seed of each usual setting, the smallest."""
    first: dict[tuple[str, str], dict[tuple[str, float], Measured]] = {}
    for m in measured:
        if not m.variant:
            first.setdefault((m.dataset, m.partition), {}).setdefault((m.algorithm, m.zeta), m)
    return [list(members.values()) for members in first.values()]


def spectrum(members: Sequence[Measured]) -> list[Picture]:
    """The largest eigenvalues against their rank."""

    def positive(entry: measurement.TopMeasurement) -> list[float]:
        values = [v for v in entry["values"] if v is not None and v > 0]  # the scale is logarithmic
        return values if len(values) > 1 else []

    shown, count = _comparable([(m, f["top"]) for m in members for f in m.files if "top" in f], positive)
    if not shown:
        return []
    figure, axes = panel(6.2, 3.4)
    lines = []
    for m, values in shown.items():
        lines.append(draw_curve(axes, m, np.arange(1, len(values) + 1), np.array(values), width=1.4))
    axes.set(title=_title(members, count), xlabel="rank", ylabel="eigenvalue", yscale="log", xlim=(1, None))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="upper right", ncols=2).set_gid("legend")
    title = f"{_title(members)}: the largest eigenvalues of the Hessian"
    return [finish(f"{_stem(members)}-top-eigenvalues", title, figure, {"lines": lines, "x": "rank"})]


def density(members: Sequence[Measured]) -> list[Picture]:
    """The smoothed density of all eigenvalues."""

    def quadrature(entry: measurement.DensityMeasurement) -> list[Density]:
        """Of the starts that stayed finite and have a weight for each node."""
        starts = [(n, w) for n, w in zip(entry["nodes"], entry["weights"], strict=False) if len(n) == len(w)]
        finite = [(n, w) for n, w in starts if None not in n and None not in w]
        nodes, weights = ([torch.tensor(pair[i], dtype=torch.float64) for pair in finite] for i in (0, 1))
        return [Density(nodes, weights, 0)] if finite else []

    shown, count = _comparable([(m, f["density"]) for m in members for f in m.files if "density" in f], quadrature)
    if not shown:
        return []
    figure, axes = panel(6.2, 3.4)
    low, high = min(d.span[0] for (d,) in shown.values()), max(d.span[1] for (d,) in shown.values())
    sigma = SMOOTH * max(high, -low) or 1.0
    grid = torch.linspace(low - 4 * sigma, high + 4 * sigma, 600, dtype=torch.float64)
    lines = []
    for m, (found,) in shown.items():
        mean = np.maximum(found.curve(sigma, grid=grid).mean.numpy(), FLOOR)
        lines.append(draw_curve(axes, m, grid.numpy(), mean, digits=3, width=1.1))
    axes.set(title=_title(members, count), xlabel="eigenvalue", ylabel="density", yscale="log", ylim=(FLOOR, None))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))
    axes.legend(loc="upper right", ncols=2).set_gid("legend")
    title = f"{_title(members)}: density of the Hessian's eigenvalues"
    return [finish(f"{_stem(members)}-density", title, figure, {"lines": lines, "x": "eigenvalue"})]


def landscapes(members: Sequence[Measured]) -> list[Picture]:
    """A surface and a map of the loss around each model, on one scale; losses that are not finite are the highest."""

    def plane(entry: measurement.LandscapeMeasurement) -> list[np.ndarray]:
        """Steps along two directions, and the losses there."""
        rows, points = entry["losses"], len(entry["offsets"])
        if not len(rows) == points > 1 or not all(isinstance(row, list) and len(row) == points for row in rows):
            return []
        offsets = np.array(entry["offsets"], dtype=float)
        return [*np.meshgrid(offsets, offsets, indexing="ij"), np.array(rows, dtype=float)]

    shown, _ = _comparable([(m, f["landscape"]) for m in members for f in m.files if "landscape" in f], plane)
    finite = [losses[np.isfinite(losses)] for _, _, losses in shown.values() if np.isfinite(losses).any()]
    if not finite:
        return []
    low, high = min(f.min() for f in finite), max(f.max() for f in finite)
    levels = np.linspace(low, high if high > low else low + 1, 19)
    made = []
    for kind, what, draw in (("surface", "loss surface", _surface), ("map", "map of the loss", _map)):
        for m, (alpha, beta, losses) in shown.items():
            figure, hover = draw(m.method, alpha, beta, np.where(np.isfinite(losses), losses, high), levels)
            name = f"{_stem(members)}-{slug(m.algorithm)}-{'man' if m.man else 'plain'}-{kind}"
            made.append(finish(name, f"{m.method}, {_title(members)}: {what}", figure, hover))
    return made


def _surface(
    title: str, alpha: np.ndarray, beta: np.ndarray, losses: np.ndarray, levels: np.ndarray
) -> tuple[Figure, None]:
    figure, axes = panel(4.1, 3.6, projection="3d")
    axes.set_position((0.0, 0.0, 0.94, 0.94))
    axes.plot_surface(alpha, beta, losses, cmap="viridis", vmin=levels[0], vmax=levels[-1], rcount=41, ccount=41,
                      rasterized=True, linewidth=0.1, edgecolor="#ffffff30")  # fmt: skip
    axes.set(zlim=(levels[0], levels[-1]), title=title)
    axes.locator_params(nbins=5)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_pane_color((1, 1, 1, 0))
    return figure, None


def _map(
    title: str, alpha: np.ndarray, beta: np.ndarray, losses: np.ndarray, levels: np.ndarray
) -> tuple[Figure, Hover]:
    figure, axes = panel(4.1, 3.6)
    axes.contourf(alpha, beta, losses, levels=levels, cmap="viridis")
    axes.contour(alpha, beta, losses, levels=levels, colors="#f8f8f8", linewidths=0.3, alpha=0.6)
    axes.set(title=title, xlabel="direction 1", ylabel="direction 2")
    axes.locator_params(nbins=5)
    axes.grid(visible=False)
    ends = float(alpha.min()), float(alpha.max())
    return figure, {"grid": losses.T.round(3).tolist(), "rows": ends, "columns": ends, "value": "loss"}


def _comparable(
    entries: Sequence[tuple[Measured, M]], read: Callable[[M], list[Item]]
) -> tuple[dict[Measured, list[Item]], int]:
    """What is drawn of each run, on one number of samples: the number that most runs have.

    Of several measurements of a run the longest is drawn, and none where all are empty.
    """
    found: dict[int, dict[Measured, list[Item]]] = {}
    for m, entry in entries:
        drawn, runs = read(entry), found.setdefault(samples(entry), {})
        if len(drawn) > len(runs.get(m, [])):
            runs[m] = drawn
    count = max(found, key=lambda n: (len(found[n]), n), default=0)
    return found.get(count, {}), count


def _stem(members: Sequence[Measured]) -> str:
    return f"{slug(members[0].dataset)}-{slug(members[0].partition)}"


def _title(members: Sequence[Measured], count: int = 0) -> str:
    where = f"{paper.title(members[0].dataset)}, {paper.partition_title(members[0].partition)}"
    return f"{where}, {count} samples" if count else where


def _power(value: float) -> str:
    """A power of ten as text: 10⁻³."""
    return "10" + str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
