"""`fedman flatness` on finished runs: against dense Hessians, its files, its pictures, what it refuses."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import fedman
from fedman.errors import UserError
from fedman.flatness import (
    Ascent,
    Hessian,
    average_sharpness,
    eigenpairs,
    filter_normalise,
    m_sharpness,
    worst_case_sharpness,
)
from fedman.models.mlp import MLP
from fedman.paper.flatness import command, measure
from fedman.paper.flatness.finished_runs import Selection
from fedman.runs import manifest
from tests.flatness.flat_cases import dense, gauss_newton
from tests.paper.flatness.flatness_calls import flatness, found, refused


def by_hand(made: Path, name: str, which: str = "all") -> tuple[MLP, torch.Tensor, torch.Tensor]:
    """A run's model and its training samples, read without the package."""
    model = MLP((4,), 3)
    weights = load_file(made / name / "model.safetensors")
    model.load_state_dict({k.removeprefix(f"{which}."): v for k, v in weights.items() if k.startswith(f"{which}.")})
    data = fedman.data.load(f"npz:{made / 'points.npz'}")
    return model, torch.tensor(data.x_train), torch.tensor(data.y_train)


def test_top_and_trace_unless_told(made, runs, capsys):
    flatness("plain", "man")
    out = capsys.readouterr().out
    matrix = dense(*by_hand(made, "man"))
    m = found(runs / "man")
    assert set(m) == {"loss", "top", "trace"} == set(found(runs / "plain"))
    assert m["top"]["values"] == pytest.approx([float(torch.linalg.eigvalsh(matrix)[-1])], rel=1e-4)
    low, high = m["trace"]["interval"]
    assert low <= float(matrix.trace()) <= high
    assert m["trace"]["error"] <= 0.01 * m["trace"]["value"]
    assert m["trace"]["converged"]
    for entry in m.values():
        assert entry["samples"] == 72
        assert entry["precision"] == "fp32"
        assert entry["version"] == fedman.runs.version.version()
        assert {"seconds", "batch_size", "device", "torch"} < set(entry)
    about = json.loads((runs / "man/flatness.json").read_text())["run"]
    asked = tomllib.loads((runs / "man/config.toml").read_text())
    local = {"data_dir", "checkpoint_seconds", "keep_state"}
    decided = {key: value for key, value in asked.items() if key not in local} | {"precision": "fp32"}
    assert asked["precision"] == "auto"  # the one that was used decided
    assert about["config"] == decided, "all that decided it"
    assert "FedAvg+MAN" in out
    assert "not checked" not in out
    assert f"{m['top']['values'][0]:.4g}" in out


@pytest.mark.slow
def test_everything_in_float64_on_another_average(made, runs):
    flatness("plain", "--model", "sel", "--precision", "fp64", "--top", "5", "--ends", "both", "--tol", "1e-9",
             "--trace", "--density", "--steps", "40", "--layers", "--clients")  # fmt: skip
    m = found(runs / "plain", "sel")
    model, x, y = by_hand(made, "plain", "sel")
    matrix = dense(model, x, y)
    values = torch.linalg.eigvalsh(matrix).flip(0)
    expected = torch.cat([values[:5], values[-5:]]).tolist()
    assert m["top"]["values"] == pytest.approx(expected, abs=1e-6 * expected[0])
    assert max(m["top"]["residuals"]) <= 1e-9 * expected[0]
    assert m["top"]["converged"] == 10
    for power, (moment, error) in enumerate(zip(m["density"]["moments"], m["density"]["moment_errors"], strict=True)):
        assert abs(moment - float((values**power).mean())) <= 5 * error + 1e-9
    start = 0
    for name, layer in (("linears.0", 64 * 4 + 64), ("linears.1", 64 * 32 + 32), ("head", 32 * 3 + 3)):
        block = matrix[start : start + layer, start : start + layer]
        entry = m["layers"]["blocks"][name]
        assert entry["parameters"] == layer
        assert entry["top"] == pytest.approx(float(torch.linalg.eigvalsh(block)[-1]), rel=1e-6)
        assert abs(entry["trace"]["value"] - float(block.trace())) <= 5 * entry["trace"]["error"]
        start += layer
    assert m["layers"]["blocks"]["linears.0"]["input_norm"] == pytest.approx(float(x.square().sum(1).mean()), rel=1e-6)
    assert m["clients"]["top"] == pytest.approx(expected[0], rel=1e-3)  # equal clients: their mean is the whole
    assert m["clients"]["top"] <= m["clients"]["mean"] == pytest.approx(np.mean(m["clients"]["clients"]))
    assert len(m["clients"]["clients"]) == 4


def test_gauss_newton_and_sharpness(made, runs, capsys):
    flatness("plain", "--precision", "fp64", "--gauss-newton", "--sharpness", "--radius", "2", "--m", "30")
    out = capsys.readouterr().out
    m = found(runs / "plain")
    assert set(m) == {"loss", "gauss_newton", "sharpness"}
    model, x, y = by_hand(made, "plain")
    matrix = gauss_newton(model, x)
    span = torch.linalg.qr(matrix @ torch.randn(len(matrix), 150, dtype=torch.float64))[0]  # of rank 2·72 at most
    top = float(torch.linalg.eigvalsh(span.T @ matrix @ span)[-1])
    assert m["gauss_newton"]["top"] == pytest.approx(top, rel=1e-4)
    assert m["gauss_newton"]["converged"]
    low, high = m["gauss_newton"]["trace"]["interval"]
    assert low <= float(matrix.trace()) <= high
    data, double = (F.cross_entropy, (x, y)), {"dtype": torch.float64}
    order = torch.randperm(72, generator=torch.Generator().manual_seed(0))
    ball, cube = Ascent(1.0, restarts=0), Ascent(0.004, math.inf, restarts=0)
    average = average_sharpness(model, *data, rho=0.2, **double)
    expected = {
        "average": {"value": average.value, "error": average.error, "rho": 0.2},
        "worst_2": {"value": worst_case_sharpness(model, *data, ball, **double).value, "rho": 1.0},
        "m_2": {"value": m_sharpness(model, data[0], (x[order], y[order]), ball, m=30, **double).value, "rho": 1.0},
        "worst_inf": {"value": worst_case_sharpness(model, *data, cube, **double).value, "rho": 0.004},
        "m_inf": {"value": m_sharpness(model, data[0], (x[order], y[order]), cube, m=30, **double).value, "rho": 0.004},
    }
    measures = m["sharpness"]["measures"]
    assert set(measures) == set(expected)
    for name, values in expected.items():
        assert measures[name] == pytest.approx(values, rel=1e-8), name
        assert f"{values['value']:.4g}" in out
    assert 0 < measures["worst_2"]["value"] < measures["m_2"]["value"]
    assert m["sharpness"]["m"] == 30
    assert "20 steps of gradient ascent" in m["sharpness"]["method"]


def test_landscapes_of_a_pair_share_their_directions(made, runs):
    flatness("plain", "man", "--landscape", "--points", "3", "--span", "0.5")
    for name in ("plain", "man"):
        model, x, y = by_hand(made, name)
        losses = found(runs / name)["landscape"]["losses"]
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert losses[1][1] == pytest.approx(float(F.cross_entropy(model(x), y).detach()), rel=1e-5)
        numbers = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
        axes = [torch.cat([torch.randn(p.shape, generator=g).flatten() for p in model.parameters()]) for g in numbers]
        one, two = (filter_normalise(model, axis) for axis in axes)
        torch.nn.utils.vector_to_parameters(weights + 0.5 * one - 0.5 * two, model.parameters())
        assert losses[2][0] == pytest.approx(float(F.cross_entropy(model(x), y).detach()), rel=1e-5)


def test_eigenvector_directions_are_those_of_the_first_run(made, runs):
    flatness("plain", "man", "--landscape", "--directions", "top", "--axes", "1", "--points", "3")
    model, x, y = by_hand(made, "plain")
    axis = eigenpairs(Hessian(model, F.cross_entropy, (x, y), dtype=torch.float64)).vectors[0].float()
    for name in ("plain", "man"):
        model, x, y = by_hand(made, name)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        ends = []
        for sign in (-1, 1):
            torch.nn.utils.vector_to_parameters(weights + sign * axis, model.parameters())
            ends.append(float(F.cross_entropy(model(x), y).detach()))
        losses = found(runs / name)["landscape"]["losses"]
        assert sorted([losses[0], losses[2]]) == pytest.approx(sorted(ends), rel=1e-3)
    assert (runs / "flatness-profile.png").exists()


def spoil(folder: Path, how: str) -> None:
    weights = load_file(folder / "model.safetensors")
    if how not in ("", "flipped"):
        (folder / "manifest.json").unlink()  # an earlier version's folder, whose files are read unchecked
    if how == "flipped":
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[len(content) // 2] ^= 1
        (folder / "model.safetensors").write_bytes(content)
    elif how == "summary":
        (folder / "summary.json").unlink()
    elif how == "model":
        (folder / "model.safetensors").unlink()
    elif how == "torn":
        (folder / "model.safetensors").write_bytes(b"\xff" * 40)
    elif how == "other":
        save_file({k: v[..., :1].contiguous() for k, v in weights.items()}, folder / "model.safetensors")
    elif how == "less":
        save_file({k: v for k, v in weights.items() if k.startswith("all")}, folder / "model.safetensors")
    elif how == "diverged":
        (folder / "summary.json").rename(folder / "diverged.json")
    elif how == "record":
        (folder / "flatness.json").write_text("{}")
    elif how == "custom":
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.replace('model = "mlp"', 'model = "custom"'))
    elif how == "part":
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.replace('"fedavg"', '"gone:Mine"') + "strength = 1.0\n")
    elif how == "data":
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.replace("points.npz", "gone.npz"))


@pytest.mark.parametrize(
    ("how", "words", "message"),
    [
        ("summary", [], "plain: this run is not finished; fedman run --out plain --resume"),
        ("model", [], "plain/model.safetensors: no such file"),
        ("flipped", [], "plain/model.safetensors: damaged (its sha256 is not the one in manifest.json)"),
        ("torn", [], "plain/model.safetensors: cannot be read"),
        ("other", [], "plain/model.safetensors: not weights of mlp for npz:"),
        ("less", ["--model", "sel"], "plain/model.safetensors: holds no model 'sel', only all"),
        ("part", [], "plain: algorithm: gone:Mine cannot be imported (ModuleNotFoundError"),
        ("custom", [], "plain: a run of your own arrays or module"),
        ("data", [], "gone.npz"),
        ("record", [], "plain/flatness.json: not measurements in format 1"),
        ("", ["--model", "best"], "model: 'best' is not one of all, sel, cloud"),
        ("", ["--top", "0"], "top: 0; at least 1"),
        ("", ["--top", "-3"], "top: -3; at least 1"),
        ("", ["--top", "2600"], "top: 2600; the model has 2499 parameters, 1 to 2499 are allowed"),
        ("", ["--top", "1300", "--ends", "both"], "1 to 1249 are allowed"),
        ("", ["--ends", "bottom"], "ends: bottom; top or both"),
        ("", ["--samples", "0"], "samples: 0; 1 to 72"),
        ("", ["--samples", "73"], "samples: 73; 1 to 72"),
        ("", ["--clients", "--samples", "3"], "samples: client "),
        ("", ["--precision", "fp16"], "precision: fp16; fp32, tf32, fp64 are allowed"),
        ("", ["--precision", "tf32"], "precision: tf32 needs a CUDA device"),
        ("", ["--device", "tpu"], "device: 'tpu' is not one of auto, cpu, cuda"),
        ("", ["--batch-size", "0"], "batch-size: 0; at least 1"),
        ("", ["--rtol", "0"], "rtol: 0.0; a number between 0 and 1"),
        ("", ["--tol", "nan"], "tol: nan; a number between 0 and 1"),
        ("", ["--density", "--starts", "0"], "starts: 0; at least 1"),
        ("", ["--density", "--steps", "0"], "steps: 0; at least 1"),
        ("", ["--sharpness", "--radius", "0"], "radius: 0.0; a positive number"),
        ("", ["--sharpness", "--m", "0"], "m: 0; at least 1 sample"),
        ("", ["--seed", "-1"], "seed: -1; 0 or more"),
        ("", ["--landscape", "--directions", "up"], "landscape: up; random or top"),
        ("", ["--landscape", "--axes", "3"], "axes: 3; 1 or 2"),
        ("", ["--landscape", "--points", "1"], "points: 1; 2 to 1001"),
        ("", ["--landscape", "--span", "0"], "span: 0.0; a positive number"),
        ("", ["--plot"], "plain/flatness.json: No such file or directory; measure the run first"),
        ("", ["nowhere"], "nowhere: no such folder"),
        ("", ["."], ".: not a run's folder (no config.toml)"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_any_work(runs, capsys, how, words, message):
    spoil(runs / "plain", how)
    before = sorted(runs.rglob("*"))
    device = [] if "--device" in words else ["--device", "cpu"]
    names = ["plain"] if "--plot" in words else ["man", "plain"]
    error = refused(capsys, *names, *words, *device)
    assert message in error
    assert error.strip().count("\n") == 0
    assert sorted(runs.rglob("*")) == before


def test_of_several_runs_those_that_diverged_are_left_out(runs, capsys):
    spoil(runs / "plain", "diverged")
    flatness("plain", "man", "--top", "1")
    assert capsys.readouterr().out.startswith("not measured, as they diverged: plain\n")
    assert set(found(runs / "man")) == {"loss", "top"}
    assert not (runs / "plain/flatness.json").exists()
    assert "plain: this run diverged" in refused(capsys, "plain", "--top", "1", "--device", "cpu")


def test_no_run_at_all(runs, capsys):
    assert "RUN: name the folder of at least one finished run" in refused(capsys)
    assert "RUN: name the folder" in refused(capsys, "--plot")
    (runs / "file").write_text("in the way")
    assert "file: not a folder" in refused(capsys, "--theory", "--out", "file")


def test_too_large_for_the_device(runs, capsys, monkeypatch):
    def run(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 70 GiB")

    monkeypatch.setattr(command.Measurer, "run", run)
    assert "batch-size: 500 samples at once do not fit" in refused(capsys, "plain", "--device", "cpu")


def test_eigenvectors_of_another_kind_of_model_are_refused(made, runs, capsys):
    rows = np.random.default_rng(1).normal(size=(40, 5)).astype(np.float32)
    np.savez(runs / "rows.npz", x=rows, y=np.arange(40) % 2)
    fedman.run(
        dataset=f"npz:{runs / 'rows.npz'}", clients=2, rounds=1, partition="iid", out=runs / "other", device="cpu"
    )
    words = ["plain", "other", "--landscape", "--directions", "top", "--device", "cpu"]
    assert "directions: top needs runs of one model" in refused(capsys, *words)
    assert not (runs / "plain/flatness.json").exists()


def test_measurements_have_checksums_too(runs, capsys):
    (runs / "man/manifest.json").unlink()
    flatness("plain", "man")
    assert "not checked, as earlier versions wrote no checksums: man\n" in capsys.readouterr().out
    path = runs / "plain/flatness.json"
    assert "flatness.json" in manifest.read(runs / "plain")
    text = path.read_text()
    for name in ("plain", "man"):
        path = runs / name / "flatness.json"
        text = path.read_text()
        path.write_text(text.replace('"value": ', '"value": 1', 1))
        assert f"{name}/flatness.json: damaged" in refused(capsys, "--plot", name)
        path.write_text(text)
    (runs / "plain/flatness.json").unlink()
    assert "plain/flatness.json: is missing, though manifest.json lists it" in refused(capsys, "--plot", "plain")


def test_a_broken_model_is_named(runs, capsys):
    weights = load_file(runs / "plain/model.safetensors")
    weights["all.head.weight"][0, 0] = torch.nan
    save_file(weights, runs / "plain/model.safetensors")
    manifest.add(runs / "plain", "model.safetensors", (runs / "plain/model.safetensors").read_bytes())
    assert "loss: not finite" in refused(capsys, "plain", "--device", "cpu")
    assert not (runs / "plain/flatness.json").exists()


def test_missing_leaves_out_what_has_been_measured(runs, capsys):
    flatness("plain", "--top", "2", "--trace")
    before = (runs / "plain/flatness.json").read_bytes()
    capsys.readouterr()
    flatness("plain", "man", "--top", "2", "--trace", "--missing")
    assert capsys.readouterr().out.startswith("1 of 2 models are measured already")
    assert (runs / "plain/flatness.json").read_bytes() == before
    assert set(found(runs / "man")) == {"loss", "top", "trace"}
    flatness("plain", "man", "--top", "2", "--trace", "--missing", "--model", "all,sel")
    assert "2 of 4 models are measured already" in capsys.readouterr().out
    assert set(found(runs / "plain", "sel")) == {"loss", "top", "trace"}
    assert found(runs / "plain")["top"] == json.loads(before)["models"]["all"]["top"]
    flatness("plain", "--density", "--missing")  # not measured yet
    assert "0 of 1 models are measured already" in capsys.readouterr().out
    flatness("plain", "man", "--missing")
    assert "2 of 2 models are measured already" in capsys.readouterr().out
    assert "directions top" in refused(capsys, "plain", "--landscape", "--directions", "top", "--missing")


def test_parameters_that_are_not_trained_have_no_eigenvalues():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    model[0].requires_grad_(False)
    samples = Selection(torch.arange(2), [torch.arange(2)])
    measure.check(measure.Request(top=8), model, samples)
    with pytest.raises(UserError, match="top: 9; the model has 8 parameters, 1 to 8 are allowed"):
        measure.check(measure.Request(top=9), model, samples)
