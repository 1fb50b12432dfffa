"""Figures of landscapes, top eigenvalues, densities and clients, saved as PNG and SVG without a display."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from fedman.errors import UserError
from fedman.flatness.blocks import ClientBound
from fedman.flatness.density import Curve
from fedman.flatness.landscape import Landscape


def surfaces(landscapes: Mapping[str, Landscape], levels: int = 20) -> Figure:
    """2-D landscapes in columns, each a surface above a contour plot; all share one scale of height and colour."""
    _some(landscapes, "landscapes")
    for name, item in landscapes.items():
        if item.losses.ndim != 2:
            raise UserError(f"landscapes: {name} has one direction, surfaces need two; use profiles")
    ticks = shared_levels(landscapes.values(), levels)
    figure = Figure(figsize=(5 * len(landscapes) + 1, 9), layout="constrained")
    flats: list[Any] = []
    filled: Any = None
    for i, (name, item) in enumerate(landscapes.items()):
        solid: Any = figure.add_subplot(2, len(landscapes), i + 1, projection="3d")
        draw_surface(solid, item, ticks)
        solid.set(title=name, xlabel="direction 1", ylabel="direction 2", zlabel="loss")
        flats.append(figure.add_subplot(2, len(landscapes), len(landscapes) + i + 1, box_aspect=1))
        filled = draw_map(flats[-1], item, ticks)
    figure.colorbar(filled, ax=flats, label="loss", format="%.3g")
    return figure


def shared_levels(landscapes: Iterable[Landscape], count: int) -> np.ndarray:
    """The ends of `count` equal steps from the lowest finite loss of all landscapes to the highest."""
    finite = [item.losses[item.losses.isfinite()] for item in landscapes]
    if not all(map(len, finite)):
        raise UserError("landscapes: one has no finite loss; take a smaller span")
    low, high = float(torch.cat(finite).min()), float(torch.cat(finite).max())
    return np.linspace(low, high if high > low else low + 1, count + 1)


def drawn_losses(item: Landscape, levels: np.ndarray) -> np.ndarray:
    """The losses; those that are not finite are drawn as the highest level."""
    losses = item.losses.numpy()
    return np.where(np.isfinite(losses), losses, levels[-1])


def draw_surface(axes: Any, item: Landscape, levels: np.ndarray) -> None:
    """A 2-D landscape as a surface on 3-D axes."""
    grid = np.meshgrid(item.offsets, item.offsets, indexing="ij")
    ends = {"vmin": levels[0], "vmax": levels[-1]}
    line = {"linewidth": 0.1, "edgecolor": "#ffffff30", "rasterized": True}
    axes.plot_surface(*grid, drawn_losses(item, levels), cmap="viridis", **ends, **line)
    axes.set(zlim=(levels[0], levels[-1]))
    axes.locator_params(nbins=5)


def draw_map(axes: Any, item: Landscape, levels: np.ndarray) -> Any:
    """A 2-D landscape as filled contours, which are returned for a colour bar."""
    drawn = *np.meshgrid(item.offsets, item.offsets, indexing="ij"), drawn_losses(item, levels)
    filled = axes.contourf(*drawn, levels=levels, cmap="viridis")
    axes.contour(*drawn, levels=levels, colors="#f8f8f8", linewidths=0.3, alpha=0.6)
    axes.set(xlabel="direction 1", ylabel="direction 2")
    axes.locator_params(nbins=5)
    return filled


def profiles(landscapes: Mapping[str, Landscape]) -> Figure:
    """1-D landscapes in one pair of axes."""
    figure, axes = _single(landscapes, "landscapes", "step along the direction", "loss")
    for name, item in landscapes.items():
        if item.losses.ndim != 1:
            raise UserError(f"landscapes: {name} has two directions, profiles need one; use surfaces")
        axes.plot(item.offsets.numpy(), item.losses.numpy(), label=name)
    axes.legend()
    return figure


def spectrum(values: Mapping[str, Tensor]) -> Figure:
    """Top eigenvalues against their rank."""
    figure, axes = _single(values, "values", "rank", "eigenvalue")
    for name, row in values.items():
        axes.plot(np.arange(1, len(row) + 1), row.cpu().numpy(), marker=".", markersize=3, linewidth=1, label=name)
    if all(bool((row > 0).all()) for row in values.values()):
        axes.set_yscale("log")
    axes.legend()
    return figure


def densities(curves: Mapping[str, Curve], floor: float = 1e-7) -> Figure:
    """Smoothed densities with a band of two standard errors, on a logarithmic scale down to `floor`."""
    figure, axes = _single(curves, "curves", "eigenvalue", "density")
    for name, curve in curves.items():
        grid, mean, band = curve.grid.numpy(), curve.mean.numpy(), 2 * np.nan_to_num(curve.error.numpy())
        (line,) = axes.plot(grid, np.maximum(mean, floor), linewidth=1, label=name)
        axes.fill_between(
            grid, np.maximum(mean - band, floor), np.maximum(mean + band, floor), alpha=0.3, color=line.get_color()
        )
    axes.set(yscale="log", ylim=(floor, None))
    axes.legend()
    return figure


def clients(bounds: Mapping[str, ClientBound]) -> Figure:
    """λ_max of the clients' losses in descending order, their mean (dashed) and λ_max of the mean loss (dotted)."""
    figure, axes = _single(bounds, "bounds", "client, by its λ_max", "λ_max")
    for name, bound in bounds.items():
        values = sorted(bound.clients, reverse=True)
        (line,) = axes.plot(np.arange(1, len(values) + 1), values, marker=".", linewidth=1, label=name)
        axes.axhline(bound.mean, color=line.get_color(), linestyle="--", linewidth=1)
        axes.axhline(bound.top, color=line.get_color(), linestyle=":", linewidth=1)
    axes.legend()
    return figure


def save(figure: Figure, stem: Path | str) -> list[Path]:
    """Save the figure as `stem`.png and `stem`.svg; the SVG's bytes are reproducible. Links are replaced."""
    stem = Path(stem)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.unlink(missing_ok=True)  # what a symbolic link leads to is not ours
        with rc_context({"svg.hashsalt": "fedman"}):
            figure.savefig(paths[0], dpi=150)
            figure.savefig(paths[1], metadata={"Date": None})
    except OSError as error:
        raise UserError(f"{stem}: {error.strerror or error}") from None
    return paths


def _single(items: Mapping[str, Any], name: str, x: str, y: str) -> tuple[Figure, Any]:
    """A figure with one pair of axes, in which all items are drawn."""
    _some(items, name)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _some(items: Mapping[str, Any], name: str) -> None:
    if not items:
        raise UserError(f"{name}: nothing to draw; at least one named entry is needed")
