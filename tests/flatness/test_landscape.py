"""Grids against one-by-one evaluation; filter normalisation; pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from flat_cases import CASES, cnn, images, mlp, rows
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.flatness import Density, Hessian, eigenpairs, filter_normalise, landscape, plot, random_direction


@torch.no_grad()
def loss_at(model: nn.Module, w: Tensor, x: Tensor, y: Tensor) -> float:
    model = model.double()
    torch.nn.utils.vector_to_parameters(w, model.parameters())
    return float(F.cross_entropy(model.eval()(x.double() if x.is_floating_point() else x), y))


def weight(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_surface_holds_the_losses_of_the_moved_models(case: str, chunk: int) -> None:
    model, (x, y) = CASES[case][0](), CASES[case][1]()
    d, e = (random_direction(model, seed).double() for seed in (1, 2))
    result = landscape(
        model, F.cross_entropy, (x, y), [d, e], points=3, span=0.5, chunk=chunk, dtype=torch.float64, batch_size=4
    )
    assert result.offsets.tolist() == [-0.5, 0, 0.5]
    for i, a in enumerate(result.offsets):
        for j, b in enumerate(result.offsets):
            expected = loss_at(CASES[case][0](), weight(model) + a * d + b * e, x, y)
            assert float(result.losses[i, j]) == pytest.approx(expected, rel=1e-10)
    assert result.samples == len(y)


def test_along_an_eigenvector_the_curvature_is_the_eigenvalue() -> None:
    model, data = mlp(), rows()
    pairs = eigenpairs(Hessian(model, F.cross_entropy, data, dtype=torch.float64), 1, tol=1e-9)
    losses = landscape(
        model, F.cross_entropy, data, [pairs.vectors[0]], points=3, span=1e-3, dtype=torch.float64
    ).losses
    assert float(losses[0] - 2 * losses[1] + losses[2]) / 1e-6 == pytest.approx(float(pairs.values[0]), rel=1e-3)


def test_random_directions_have_the_filters_norms_and_share_their_numbers() -> None:
    model, scaled = cnn(), cnn()
    with torch.no_grad():
        scaled[0].weight[1] *= 3
    d, same, other, big = (random_direction(*a) for a in ((model, 1), (model, 1), (model, 2), (scaled, 1)))
    assert torch.equal(d, same)
    assert not torch.equal(d, other)
    conv = d[:18].reshape(2, 9)
    assert torch.allclose(conv.norm(dim=1), model[0].weight.detach().flatten(1).norm(dim=1))
    assert not d[18:20].any()
    assert torch.allclose(big[9:18], 3 * d[9:18])
    assert torch.allclose(big[:9], d[:9])
    assert torch.allclose(filter_normalise(model, 5 * d), d, atol=1e-6)


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
    figures = [plot.save(plot.densities({"a": curve}), tmp_path / name)[1] for name in ("one", "two")]
    assert figures[0].read_bytes() == figures[1].read_bytes()


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    model, data = mlp(), rows()
    d = random_direction(model, 0)
    for directions, options, message in (
        ([], {}, "directions: 0 given"),
        ([d, d, d], {}, "directions: 3 given"),
        ([d[:3]], {}, r"directions: one is of shape \(3,\), \[79\]"),
        ([d], {"points": 1}, "points, span: 1, 1.0"),
        ([d], {"span": 0.0}, r"points, span: 41, 0\.0"),
    ):
        with pytest.raises(UserError, match=message):
            landscape(model, F.cross_entropy, data, directions, **options)
    line = landscape(model, F.cross_entropy, data, [d], points=3)
    with pytest.raises(UserError, match="landscapes: a has one direction"):
        plot.surfaces({"a": line})
    with pytest.raises(UserError, match="values: nothing to draw"):
        plot.spectrum({})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        plot.save(plot.profiles({"a": line}), tmp_path / "file" / "x")
