"""Figures of landscapes, spectra and densities: shared scales, files, bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fedman.errors import UserError
from fedman.flatness import Density, landscape, plot, random_direction
from tests.flatness.flat_cases import cnn, images, mlp, rows


def test_the_grid_of_one_pair_of_models_is_drawn_with_one_scale(tmp_path: Path) -> None:
    steep = cnn()
    with torch.no_grad():
        steep[4].weight *= 6
    grids = {
        name: landscape(model, F.cross_entropy, images(), [random_direction(model, s) for s in (0, 1)], points=5)
        for name, model in (("plain", steep), ("MAN", cnn()))
    }
    figure = plot.surfaces(grids)
    solid, flat, other_solid, other_flat = figure.axes[:4]
    assert solid.get_zlim() == other_solid.get_zlim()
    scales = {axes.collections[0].get_clim() for axes in (solid, flat, other_solid, other_flat)}
    losses = torch.cat([grid.losses.flatten() for grid in grids.values()])
    assert scales == {(float(losses.min()), float(losses.max()))}
    paths = plot.save(figure, tmp_path / "deep" / "surface.v1")
    assert [p.name for p in paths] == ["surface.v1.png", "surface.v1.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in paths[1].read_bytes()


def test_lines_spectra_and_densities_are_drawn(tmp_path: Path) -> None:
    model = mlp()
    line = landscape(model, F.cross_entropy, rows(), [random_direction(model, 0)], points=5)
    assert len(plot.profiles({"a": line}).axes[0].lines) == 1
    assert plot.spectrum({"a": torch.tensor([3.0, 1.0])}).axes[0].get_yscale() == "log"
    assert plot.spectrum({"a": torch.tensor([3.0, -1.0])}).axes[0].get_yscale() == "linear"
    nodes = [torch.tensor([0.0, 1.0], dtype=torch.float64)] * 2
    curve = Density(nodes, [torch.tensor([0.9, 0.1], dtype=torch.float64)] * 2, 4).curve()
    precious = tmp_path / "precious"
    precious.write_text("not ours")
    (tmp_path / "two.svg").symlink_to(precious)
    figures = [plot.save(plot.densities({"a": curve}), tmp_path / name)[1] for name in ("one", "two")]
    assert figures[0].read_bytes() == figures[1].read_bytes()
    assert precious.read_text() == "not ours"


def test_bad_figures_are_refused(tmp_path: Path) -> None:
    model = mlp()
    line = landscape(model, F.cross_entropy, rows(), [random_direction(model, 0)], points=3)
    with pytest.raises(UserError, match="landscapes: a has one direction"):
        plot.surfaces({"a": line})
    with pytest.raises(UserError, match="values: nothing to draw"):
        plot.spectrum({})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        plot.save(plot.profiles({"a": line}), tmp_path / "file" / "x")
