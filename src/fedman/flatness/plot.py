"""Figures of landscapes, top eigenvalues, densities and clients, saved as PNG and SVG without a display."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
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
    finite = np.concatenate([_finite(item.losses.numpy()) for item in landscapes.values()])
    low, high = float(finite.min()), float(finite.max())
    ticks = np.linspace(low, high if high > low else low + 1, levels + 1)
    figure = Figure(figsize=(5 * len(landscapes) + 1, 9), layout="constrained")
    flats: list[Any] = []
    filled: Any = None
    for i, (name, item) in enumerate(landscapes.items()):
        beta, alpha = np.meshgrid(item.offsets.numpy(), item.offsets.numpy())
        losses = np.where(np.isfinite(item.losses.numpy()), item.losses.numpy(), high)
        solid: Any = figure.add_subplot(2, len(landscapes), i + 1, projection="3d")
        solid.plot_surface(alpha, beta, losses, cmap="viridis", vmin=ticks[0], vmax=ticks[-1])
        solid.set(zlim=(ticks[0], ticks[-1]), title=name, xlabel="direction 1", ylabel="direction 2", zlabel="loss")
        solid.locator_params(nbins=5)
        flat = figure.add_subplot(2, len(landscapes), len(landscapes) + i + 1)
        filled = flat.contourf(alpha, beta, losses, levels=ticks, cmap="viridis")
        flat.contour(alpha, beta, losses, levels=ticks, colors="white", linewidths=0.4)
        flat.set(xlabel="direction 1", ylabel="direction 2", box_aspect=1)
        flat.locator_params(nbins=5)
        flats.append(flat)
    figure.colorbar(filled, ax=flats, label="loss", format="%.3g")
    return figure


def profiles(landscapes: Mapping[str, Landscape]) -> Figure:
    """1-D landscapes in one pair of axes."""
    _some(landscapes, "landscapes")
    figure, axes = _single("step along the direction", "loss")
    for name, item in landscapes.items():
        if item.losses.ndim != 1:
            raise UserError(f"landscapes: {name} has two directions, profiles need one; use surfaces")
        axes.plot(item.offsets.numpy(), item.losses.numpy(), label=name)
    axes.legend()
    return figure


def spectrum(values: Mapping[str, Tensor]) -> Figure:
    """Top eigenvalues against their rank."""
    _some(values, "values")
    figure, axes = _single("rank", "eigenvalue")
    for name, row in values.items():
        axes.plot(np.arange(1, len(row) + 1), row.cpu().numpy(), marker=".", markersize=3, linewidth=1, label=name)
    if all(bool((row > 0).all()) for row in values.values()):
        axes.set_yscale("log")
    axes.legend()
    return figure


def densities(curves: Mapping[str, Curve], floor: float = 1e-7) -> Figure:
    """Smoothed densities with a band of two standard errors, on a logarithmic scale down to `floor`."""
    _some(curves, "curves")
    figure, axes = _single("eigenvalue", "density")
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
    _some(bounds, "bounds")
    figure, axes = _single("client, by its λ_max", "λ_max")
    for name, bound in bounds.items():
        values = sorted(bound.clients, reverse=True)
        (line,) = axes.plot(np.arange(1, len(values) + 1), values, marker=".", linewidth=1, label=name)
        axes.axhline(bound.mean, color=line.get_color(), linestyle="--", linewidth=1)
        axes.axhline(bound.top, color=line.get_color(), linestyle=":", linewidth=1)
    axes.legend()
    return figure


def save(figure: Figure, stem: Path | str) -> list[Path]:
    """Save the figure as `stem`.png and `stem`.svg; the SVG's bytes are reproducible."""
    stem = Path(stem)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": "fedman"}):
            figure.savefig(paths[0], dpi=150)
            figure.savefig(paths[1], metadata={"Date": None})
    except OSError as error:
        raise UserError(f"{stem}: {error.strerror or error}") from None
    return paths


def _single(x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _some(items: Mapping[str, Any], name: str) -> None:
    if not items:
        raise UserError(f"{name}: nothing to draw; at least one named entry is needed")


def _finite(losses: np.ndarray) -> np.ndarray:
    finite = losses[np.isfinite(losses)]
    if not finite.size:
        raise UserError("landscapes: one has no finite loss; take a smaller span")
    return finite
