"""Figures of measured runs side by side, and of the theory's demonstration, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fedman.flatness import plot
from fedman.flatness.blocks import ClientBound
from fedman.flatness.density import Curve, Density
from fedman.flatness.landscape import Landscape
from fedman.paper.flatness.flatness_json import LayerBlock, Measurements, Number


def draw(measured: Mapping[str, Measurements], out: Path) -> list[Path]:
    """Every figure that these measurements allow, saved in `out`."""
    kinds: list[tuple[str, Callable[[Any], Figure], Callable[[Measurements], object]]] = [
        ("top", plot.spectrum, _several_eigenvalues),
        ("density", plot.densities, _density_curve),
        ("landscape", plot.surfaces, lambda m: landscape(m, axes=2)),
        ("profile", plot.profiles, lambda m: landscape(m, axes=1)),
        ("layers", layers, lambda m: m["layers"]["blocks"] if "layers" in m else None),
        ("clients", plot.clients, _clients),
    ]
    paths = []
    for name, figure, read in kinds:
        found = {label: item for label, m in measured.items() if (item := read(m)) is not None}
        if found:
            paths += plot.save(figure(found), out / f"flatness-{name}")
    return paths


def layers(runs: Mapping[str, Mapping[str, LayerBlock]]) -> Figure:
    """λ_max of every layer's block (left), and against the squared norm of the layer's input (right)."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    bars, points = figure.subplots(1, 2)
    names = list(dict.fromkeys(name for blocks in runs.values() for name in blocks))
    width = 0.8 / len(runs)
    for i, (run, blocks) in enumerate(runs.items()):
        place = [names.index(name) + (i - (len(runs) - 1) / 2) * width for name in blocks]
        bars.bar(place, _tensor([b["top"] for b in blocks.values()]), width, label=run)
        known = [
            (name, b["input_norm"], b["top"]) for name, b in blocks.items() if None not in (b["input_norm"], b["top"])
        ]
        points.plot([x for _, x, _ in known], [y for _, _, y in known], "o", label=run)
        for name, x, y in known:
            points.annotate(name, (x, y), fontsize=6, xytext=(4, 2), textcoords="offset points")
    bars.set_xticks(range(len(names)), names)
    bars.set(ylabel="λ_max of the layer's block")
    points.set(xscale="log", yscale="log", xlabel="mean ‖a‖² of the layer's input", ylabel="λ_max of the layer's block")
    for axes in (bars, points):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def layer_paths(runs: Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]]) -> Figure:
    """λ_max of each layer against the mean ‖a‖² of its input, a dot for each round; the last one is large."""
    names = list(dict.fromkeys(name for layers in runs.values() for name in layers))
    figure = Figure(figsize=(3.2 * len(names), 3.4), layout="constrained")
    for i, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), i + 1)
        for run, layers in runs.items():
            _, norms, tops = zip(*layers[name], strict=True)
            (line,) = axes.plot(norms, tops, marker=".", linewidth=0.8, label=run)
            axes.plot(norms[-1:], tops[-1:], "o", color=line.get_color())
        axes.set(xscale="log", yscale="log", title=name, xlabel="mean ‖a‖² of the input")
        axes.grid(alpha=0.3)
        if i == 0:
            axes.set_ylabel("λ_max of the layer's block")
            axes.legend()
    return figure


def density(m: Measurements) -> Density | None:
    """The quadratures of the starts that stayed finite."""
    starts = zip(m["density"]["nodes"], m["density"]["weights"], strict=True) if "density" in m else ()
    finite = [(_tensor(nodes), _tensor(weights)) for nodes, weights in starts if None not in (*nodes, *weights)]
    return Density([nodes for nodes, _ in finite], [weights for _, weights in finite], 0) if finite else None


def landscape(m: Measurements, axes: int) -> Landscape | None:
    """The losses along so many directions."""
    if "landscape" not in m:
        return None
    losses = _tensor(m["landscape"]["losses"])
    return Landscape(_tensor(m["landscape"]["offsets"]), losses, 0) if losses.ndim == axes else None


def _several_eigenvalues(m: Measurements) -> Tensor | None:
    return _tensor(m["top"]["values"]) if "top" in m and len(m["top"]["values"]) > 1 else None


def _density_curve(m: Measurements) -> Curve | None:
    found = density(m)
    return found.curve() if found else None


def _clients(m: Measurements) -> ClientBound | None:
    if "clients" not in m:
        return None
    found = m["clients"]
    return ClientBound(found["top"], found["mean"], found["clients"], 0.0, 0)


def _tensor(values: Sequence[Number] | Sequence[Sequence[Number]]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64))  # None becomes nan
