"""Compact results: what they keep, what they leave out."""

import pytest

import fedman
from fedman.errors import UserError
from fedman.runs import results


def test_a_folder_of_runs_becomes_one_file_and_comes_back(tmp_path):
    for seed in (1, 0):
        fedman.run(
            model="mlp", clients=5, participation=0.5, rounds=3, epochs=1, seed=seed, out=tmp_path / f"seed{seed}"
        )
    rows = results.collect([tmp_path])
    assert [row["config"]["seed"] for row in rows] == [0, 1]
    assert rows[0]["curve"]["round"] == [1, 2, 3]
    assert rows[0]["curve"]["all"][-1] == rows[0]["accuracy"]["all"]
    assert {"seconds", "version", "device", "precision"} <= rows[0].keys()
    with pytest.raises(UserError, match="no finished run here"):
        results.collect([tmp_path / "nowhere"])
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(UserError, match="not a results file"):
        results.read(tmp_path / "bad.jsonl")


def test_long_curves_are_thinned_and_keep_their_end(tmp_path):
    out = tmp_path / "run"
    fedman.run(model="mlp", clients=3, participation=1.0, rounds=250, epochs=1, batch_size=1000, out=out)
    curve = results.compact(out)["curve"]
    assert len(curve["round"]) <= results.POINTS
    assert curve["round"][-1] == 250
