"""Flatness: the largest eigenvalue and the trace beside the paper's, top eigenvalues, densities, landscapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from fedman.flatness.density import Density
from fedman.report import paper
from fedman.report.curves import group_id, line
from fedman.report.picture import Picture, colour, finish, panel
from fedman.report.series import method_order, method_title
from fedman.report.tables import NOTHING, Table, slug
from fedman.tables import mean_std

MODEL = "all"  # of a run's three models the one whose accuracy is reported
FLOOR = 1e-7  # of a density, on its logarithmic scale
SMOOTH = 0.005  # width of a density's Gaussians, as a share of the largest eigenvalue drawn


@dataclass(frozen=True)
class Measured:
    """The measurements of one run's model `all`."""

    dataset: str
    partition: str
    algorithm: str
    zeta: float
    seed: int
    entries: dict[str, dict[str, Any]]

    @property
    def man(self) -> bool:
        return self.zeta > 0

    @property
    def method(self) -> str:
        return method_title(self.algorithm, self.man)

    def figure(self, name: str) -> float:
        """`top`: λ_max; `trace`: the trace; nan where it was not measured."""
        entry = self.entries.get(name, {})
        value = entry.get("values", [None])[0] if name == "top" else entry.get("value")
        return math.nan if value is None else float(value)


def read(records: Sequence[dict[str, Any]]) -> list[Measured]:
    """The models `all` of these flatness records, in the paper's order."""
    found = []
    for record in records:
        run = {key: record["run"][key] for key in ("dataset", "partition", "algorithm", "zeta", "seed")}
        if MODEL in record["models"]:
            found.append(Measured(entries=record["models"][MODEL], **run))
    return sorted(found, key=lambda m: (m.dataset, m.partition, method_order(m.algorithm), m.zeta, m.seed))


def tables(measured: Sequence[Measured]) -> list[Table]:
    """λ_max and trace of every method, mean over seeds, with the paper's; a table a partition."""
    groups: dict[tuple[str, str], dict[tuple[str, float], list[Measured]]] = {}
    for m in measured:
        groups.setdefault((m.dataset, m.partition), {}).setdefault((m.algorithm, m.zeta), []).append(m)
    return [_table(*key, list(members.values())) for key, members in groups.items()]


def _table(dataset: str, partition: str, groups: Sequence[Sequence[Measured]]) -> Table:
    header = ["method", "λ_max", "paper", "ratio", "trace", "paper", "ratio", "seeds"]
    rows: list[list[str]] = []
    tones: dict[tuple[int, int], str] = {}
    doubts = False
    for members in groups:
        printed = paper.sharpness(dataset, partition, members[0].algorithm, members[0].man)
        doubtful = printed is not None and bool(printed.doubt)
        doubts |= doubtful
        row = [members[0].method]
        for name, digits in (("top", 2), ("trace", 0)):
            values = [m.figure(name) for m in members if not math.isnan(m.figure(name))]
            theirs = getattr(printed, name) if printed else None
            tones[len(rows), len(row) + 1] = "quiet"
            row += [
                mean_std(values, digits),
                f"{theirs:.{digits}f}{'*' if doubtful else ''}" if theirs is not None else NOTHING,
                f"{np.mean(values) / theirs:.2f}" if theirs and values and not doubtful else NOTHING,
            ]
        rows.append([*row, str(len(members))])
    note = "* The paper's figure is a copy: FedASAM repeats FedAvg, FedDC has one column twice." if doubts else ""
    title = f"{paper.title(dataset)}, {paper.partition_title(partition)}: the Hessian"
    return Table(f"hessian-{slug(dataset)}-{slug(partition)}", title, header, rows, note, tones=tones)


def layers(measured: Sequence[Measured]) -> Table | None:
    """Each layer's own block beside the norm of what it is fed: the paper's mechanism, layer by layer."""
    rows = []
    for m in measured:
        for name, block in m.entries.get("layers", {}).get("blocks", {}).items():
            figures = [block.get("top"), block.get("trace", {}).get("value"), block.get("input_norm")]
            shown = [NOTHING if value is None else f"{value:.4g}" for value in figures]
            rows.append([m.partition, m.method, str(m.seed), name, *shown])
    header = ["partition", "method", "seed", "layer", "λ_max", "trace", "input norm"]
    return Table("hessian-layers", "The Hessian's blocks, layer by layer", header, rows, words=4) if rows else None


def clients(measured: Sequence[Measured]) -> Table | None:
    """The first step of the paper's argument: λ_max of the mean loss is at most the mean of the clients' λ_max."""
    rows = []
    for m in measured:
        entry = m.entries.get("clients", {})
        if "top" in entry and "mean" in entry:
            each = [v for v in entry.get("clients", []) if v is not None]
            rest = [f"{min(each):.4g}", f"{max(each):.4g}"] if each else [NOTHING, NOTHING]
            rows.append([m.partition, m.method, str(m.seed), f"{entry['top']:.4g}", f"{entry['mean']:.4g}", *rest])
    header = ["partition", "method", "seed", "λ_max of the mean", "mean of clients' λ_max", "smallest", "largest"]
    return Table("hessian-clients", "λ_max of the clients", header, rows, words=3) if rows else None


def basis(measured: Sequence[Measured]) -> str:
    """What the Hessian is of, in words."""
    counts = {entry["samples"] for m in measured for entry in m.entries.values() if "samples" in entry}
    samples = f"{counts.pop():,} training samples".replace(",", " ") if len(counts) == 1 else "training samples"
    return f"Of the mean cross-entropy on {samples}, at the mean of all clients' last models."


def drops(measured: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """Plain and MAN of the same algorithm, partition and seed."""
    found = {(m.dataset, m.partition, m.algorithm, m.seed, m.man): m for m in measured}
    return [(m, found[*key[:4], True]) for key, m in found.items() if not m.man and (*key[:4], True) in found]


def pictures(measured: Sequence[Measured]) -> dict[str, list[Picture]]:
    """By kind: top eigenvalues, densities, landscapes; one seed of each setting is drawn, the smallest."""
    first: dict[tuple[str, str], list[Measured]] = {}
    seen: set[tuple[str, str, str, float]] = set()
    for m in measured:
        if (key := (m.dataset, m.partition, m.algorithm, m.zeta)) not in seen:
            seen.add(key)
            first.setdefault((m.dataset, m.partition), []).append(m)
    made: dict[str, list[Picture]] = {"spectrum": [], "density": [], "landscape": []}
    for (dataset, partition), members in first.items():
        where = f"{paper.title(dataset)}, {paper.partition_title(partition)}"
        stem = f"{slug(dataset)}-{slug(partition)}"
        tops = [m for m in members if len(_positive(m)) > 1]
        if tops:
            made["spectrum"].append(_spectrum(stem, where, tops))
        made["density"] += _density(stem, where, [m for m in members if "density" in m.entries])
        planes = [m for m in members if _square(m.entries.get("landscape", {}))]
        made["landscape"] += _landscapes(stem, where, planes)
    return made


def _spectrum(stem: str, where: str, members: Sequence[Measured]) -> Picture:
    """The largest eigenvalues against their rank."""
    figure, axes = panel(6.2, 3.4)
    lines = []
    for m in members:
        values = np.array(_positive(m))
        ranks = np.arange(1, len(values) + 1)
        axes.plot(ranks, values, label=m.method, **_stroke(m))
        lines.append(line(m.method, m.algorithm, m.man, ranks, values, 4))
    axes.set(title=where, xlabel="rank", ylabel="eigenvalue", yscale="log", xlim=(1, None))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="upper right", ncols=2).set_gid("legend")
    title = f"{where}: the largest eigenvalues of the Hessian"
    return finish(f"{stem}-top-eigenvalues", title, figure, {"lines": lines, "x": "rank"})


def _density(stem: str, where: str, members: Sequence[Measured]) -> list[Picture]:
    """The smoothed density of all eigenvalues."""
    figure, axes = panel(6.2, 3.4)
    lines = []
    found = [(m, quadrature) for m in members if (quadrature := _quadrature(m.entries["density"])).nodes]
    if not found:
        return []
    low, high = min(d.span[0] for _, d in found), max(d.span[1] for _, d in found)
    sigma = SMOOTH * max(high, -low) or 1.0
    grid = torch.linspace(low - 4 * sigma, high + 4 * sigma, 600, dtype=torch.float64)
    for m, quadrature in found:
        mean = np.maximum(quadrature.curve(sigma, grid=grid).mean.numpy(), FLOOR)
        axes.plot(grid.numpy(), mean, label=m.method, **_stroke(m, 1.1))
        lines.append(line(m.method, m.algorithm, m.man, grid.numpy(), mean, 3))
    axes.set(title=where, xlabel="eigenvalue", ylabel="density", yscale="log", ylim=(FLOOR, None))
    axes.legend(loc="upper right", ncols=2).set_gid("legend")
    title = f"{where}: density of the Hessian's eigenvalues"
    return [finish(f"{stem}-density", title, figure, {"lines": lines, "x": "eigenvalue"})]


def _positive(m: Measured) -> list[float]:
    """Its largest eigenvalues, as far as they are positive: the scale is logarithmic."""
    return [v for v in m.entries.get("top", {}).get("values", []) if v is not None and v > 0]


def _quadrature(entry: dict[str, Any]) -> Density:
    """The quadratures of the starts that stayed finite and have a weight for each node."""
    starts = [(n, w) for n, w in zip(entry["nodes"], entry["weights"], strict=False) if len(n) == len(w)]
    finite = [(n, w) for n, w in starts if None not in n and None not in w]
    nodes, weights = ([torch.tensor(pair[i], dtype=torch.float64) for pair in finite] for i in (0, 1))
    return Density(nodes, weights, 0)


def _square(entry: dict[str, Any]) -> bool:
    """Whether there is a landscape with two directions."""
    losses, points = entry.get("losses", []), len(entry.get("offsets", []))
    return len(losses) == points > 1 and all(isinstance(row, list) and len(row) == points for row in losses)


def _landscapes(stem: str, where: str, members: Sequence[Measured]) -> list[Picture]:
    """A surface and a map of the loss around each model, on one scale."""
    planes = [np.array(m.entries["landscape"]["losses"], dtype=float) for m in members]
    finite = [p[np.isfinite(p)] for p in planes]
    if not any(f.size for f in finite):
        return []
    low, high = min(f.min() for f in finite if f.size), max(f.max() for f in finite if f.size)
    levels = np.linspace(low, high if high > low else low + 1, 19)
    made = []
    for kind in ("surface", "map"):
        for m, plane in zip(members, planes, strict=True):
            offsets = np.array(m.entries["landscape"]["offsets"], dtype=float)
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
