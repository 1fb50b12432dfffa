"""Compact results: what they keep, what they leave out."""

import json

import pytest

import fedman
from fedman.errors import UserError
from fedman.runs import results
from tests.runs.run_records import ROW


def test_a_folder_of_runs_becomes_one_file_and_comes_back(tmp_path):
    for seed in (1, 0):
        fedman.run(
            model="mlp", clients=5, participation=0.5, rounds=3, epochs=1, seed=seed, out=tmp_path / f"seed{seed}"
        )
    rows = results.collect(tmp_path)
    assert [row["config"]["seed"] for row in rows] == [0, 1]
    assert rows[0]["curve"]["round"] == [1, 2, 3]
    assert rows[0]["curve"]["all"][-1] == rows[0]["accuracy"]["all"]
    assert {"seconds", "version", "device", "precision"} <= rows[0].keys()
    (tmp_path / "seed0" / "nothing").mkdir()
    with pytest.raises(UserError, match="no finished run here"):
        results.load(tmp_path / "seed0" / "nothing")
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(UserError, match="not a results file"):
        results.read(tmp_path / "bad.jsonl")


def test_long_curves_are_thinned_and_keep_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "POINTS", 20)
    out = tmp_path / "run"
    fedman.run(model="mlp", clients=3, participation=1.0, rounds=50, epochs=1, batch_size=1000, out=out)
    curve = results.collect(out)[0]["curve"]
    assert 10 <= len(curve["round"]) <= 20
    assert curve["round"][-1] == 50


@pytest.mark.parametrize("text", ["{", "[]\n", "3\n", "[" * 100_000, "\n", json.dumps(ROW)[:-2]])
def test_files_that_are_no_results(tmp_path, text):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=r"r\.jsonl: line 1: "):
        results.read(path)


def test_diverged_runs_are_results_too(tmp_path):
    with pytest.raises(fedman.errors.Diverged):
        fedman.run(model="mlp", clients=5, epochs=1, lr=1e30, clip=float("inf"), out=tmp_path / "run")
    (row,) = results.collect(tmp_path)
    assert "not finite" in row["diverged"]
    assert results.join([("a", [row]), ("b", [row])]) == [row]


def test_a_row_that_is_read_is_what_was_written(tmp_path):
    """Unknown fields, the order of keys and the bits of the numbers included; not a number equals itself."""
    row = ROW | {"later": {"version": [1, None]}}
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (kept,) = results.join([("a", results.read(path)), ("b", results.read(path))])
    assert json.dumps(kept) == json.dumps(row)
