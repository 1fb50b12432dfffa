"""Pictures of flatness: the largest eigenvalues, densities, loss landscapes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, StrMethodFormatter

from fedman.flatness.density import Density
from fedman.paper import targets as paper
from fedman.paper.report.curves import group_id, line
from fedman.paper.report.figure import Picture, colour, finish, panel
from fedman.paper.report.hessian import Entry, Measured, samples
from fedman.paper.report.tables import slug

FLOOR = 1e-7  # of a density, on its logarithmic scale
SMOOTH = 0.005  # width of a density's Gaussians, as a share of the largest eigenvalue drawn
Shown = Sequence[tuple[Measured, Entry]]


def pictures(measured: Sequence[Measured]) -> dict[str, list[Picture]]:
    """By kind: top eigenvalues, densities, landscapes; one seed of each usual setting is drawn, the smallest."""
    first: dict[tuple[str, str], list[Measured]] = {}
    seen: set[tuple[str, str, str, float]] = set()
    for m in measured:
        if not m.variant and (key := (m.dataset, m.partition, m.algorithm, m.zeta)) not in seen:
            seen.add(key)
            first.setdefault((m.dataset, m.partition), []).append(m)
    made: dict[str, list[Picture]] = {"spectrum": [], "density": [], "landscape": []}
    for (dataset, partition), members in first.items():
        where = f"{paper.title(dataset)}, {paper.partition_title(partition)}"
        stem = f"{slug(dataset)}-{slug(partition)}"
        for kind, name, usable, draw in (
            ("spectrum", "top", _several, _spectrum),
            ("density", "density", _finite, _density),
            ("landscape", "landscape", _square, _landscapes),
        ):
            shown = _alike(members, name, usable)
            if shown:
                made[kind] += draw(stem, where, shown)
    return made


def _alike(members: Sequence[Measured], name: str, usable: Callable[[Entry], bool]) -> Shown:
    """Measurements on one number of samples, so that they can be compared: the number that most runs have."""
    counts = Counter(n for m in members for n in {samples(e) for e in m.entries.get(name, []) if usable(e)})
    if not counts:
        return []
    count = max(counts, key=lambda n: (counts[n], n))
    return [(m, m.on(name, count)) for m in members if usable(m.on(name, count))]


def _spectrum(stem: str, where: str, shown: Shown) -> list[Picture]:
    """The largest eigenvalues against their rank."""
    figure, axes = panel(6.2, 3.4)
    lines = []
    for m, entry in shown:
        values = np.array(_positive(entry))
        ranks = np.arange(1, len(values) + 1)
        axes.plot(ranks, values, label=m.method, **_stroke(m))
        lines.append(line(m.method, m.algorithm, m.man, ranks, values, 4))
    axes.set(title=_titled(where, shown), xlabel="rank", ylabel="eigenvalue", yscale="log", xlim=(1, None))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="upper right", ncols=2).set_gid("legend")
    title = f"{where}: the largest eigenvalues of the Hessian"
    return [finish(f"{stem}-top-eigenvalues", title, figure, {"lines": lines, "x": "rank"})]


def _density(stem: str, where: str, shown: Shown) -> list[Picture]:
    """The smoothed density of all eigenvalues."""
    figure, axes = panel(6.2, 3.4)
    lines = []
    found = [(m, _quadrature(entry)) for m, entry in shown]
    low, high = min(d.span[0] for _, d in found), max(d.span[1] for _, d in found)
    sigma = SMOOTH * max(high, -low) or 1.0
    grid = torch.linspace(low - 4 * sigma, high + 4 * sigma, 600, dtype=torch.float64)
    for m, quadrature in found:
        mean = np.maximum(quadrature.curve(sigma, grid=grid).mean.numpy(), FLOOR)
        axes.plot(grid.numpy(), mean, label=m.method, **_stroke(m, 1.1))
        lines.append(line(m.method, m.algorithm, m.man, grid.numpy(), mean, 3))
    axes.set(title=_titled(where, shown), xlabel="eigenvalue", ylabel="density", yscale="log", ylim=(FLOOR, None))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))
    axes.legend(loc="upper right", ncols=2).set_gid("legend")
    title = f"{where}: density of the Hessian's eigenvalues"
    return [finish(f"{stem}-density", title, figure, {"lines": lines, "x": "eigenvalue"})]


def _titled(where: str, shown: Shown) -> str:
    count = samples(shown[0][1])
    return f"{where}, {count} samples" if count else where


def _power(value: float) -> str:
    """A power of ten as text: 10⁻³."""
    return "10" + str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _positive(entry: Entry) -> list[float]:
    """Its largest eigenvalues, as far as they are positive: the scale is logarithmic."""
    return [v for v in entry.get("values", []) if v is not None and v > 0]


def _several(entry: Entry) -> bool:
    return len(_positive(entry)) > 1


def _finite(entry: Entry) -> bool:
    return bool(entry) and bool(_quadrature(entry).nodes)


def _quadrature(entry: Entry) -> Density:
    """The quadratures of the starts that stayed finite and have a weight for each node."""
    starts = [(n, w) for n, w in zip(entry["nodes"], entry["weights"], strict=False) if len(n) == len(w)]
    finite = [(n, w) for n, w in starts if None not in n and None not in w]
    nodes, weights = ([torch.tensor(pair[i], dtype=torch.float64) for pair in finite] for i in (0, 1))
    return Density(nodes, weights, 0)


def _square(entry: Entry) -> bool:
    """Whether there is a landscape with two directions."""
    losses, points = entry.get("losses", []), len(entry.get("offsets", []))
    return len(losses) == points > 1 and all(isinstance(row, list) and len(row) == points for row in losses)


def _landscapes(stem: str, where: str, shown: Shown) -> list[Picture]:
    """A surface and a map of the loss around each model, on one scale."""
    planes = [np.array(entry["losses"], dtype=float) for _, entry in shown]
    finite = [p[np.isfinite(p)] for p in planes]
    if not any(f.size for f in finite):
        return []
    low, high = min(f.min() for f in finite if f.size), max(f.max() for f in finite if f.size)
    levels = np.linspace(low, high if high > low else low + 1, 19)
    made = []
    for kind in ("surface", "map"):
        for (m, entry), plane in zip(shown, planes, strict=True):
            offsets = np.array(entry["offsets"], dtype=float)
            beta, alpha = np.meshgrid(offsets, offsets)
            losses = np.where(np.isfinite(plane), plane, high)
            made.append(_landscape(kind, stem, f"{m.method}, {where}", m, (alpha, beta, losses), levels))
    return made


def _landscape(
    kind: str, stem: str, title: str, m: Measured, plane: tuple[Any, Any, Any], levels: np.ndarray
) -> Picture:
    name = f"{stem}-{slug(m.algorithm)}-{'man' if m.man else 'plain'}-{kind}"
    if kind == "map":
        figure, axes = panel(4.1, 3.6)
        axes.contourf(*plane, levels=levels, cmap="viridis")
        axes.contour(*plane, levels=levels, colors="#f8f8f8", linewidths=0.3, alpha=0.6)
        axes.set(title=m.method, xlabel="direction 1", ylabel="direction 2")
        axes.locator_params(nbins=5)
        axes.grid(visible=False)
        values = [[round(float(v), 3) for v in row] for row in plane[2].T]
        ends = [float(plane[0].min()), float(plane[0].max())]
        hover = {"grid": values, "rows": ends, "columns": ends, "value": "loss"}
        return finish(name, f"{title}: map of the loss", figure, hover)
    figure, axes = panel(4.1, 3.6, projection="3d")
    axes.set_position((0.0, 0.0, 0.94, 0.94))
    axes.plot_surface(*plane, cmap="viridis", vmin=levels[0], vmax=levels[-1], rcount=41, ccount=41, rasterized=True,
                      linewidth=0.1, edgecolor="#ffffff30")  # fmt: skip
    axes.set(zlim=(levels[0], levels[-1]), title=m.method)
    axes.locator_params(nbins=5)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_pane_color((1, 1, 1, 0))
    return finish(name, f"{title}: loss surface", figure)


def _stroke(m: Measured, width: float = 1.4) -> dict[str, Any]:
    style = {"linewidth": width} if m.man else {"linewidth": 0.8 * width, "linestyle": (0, (4, 2))}
    return {"color": colour(m.algorithm), "gid": group_id(m.algorithm, m.man), **style}
