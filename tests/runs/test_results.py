"""Compact results: what they keep, what they leave out."""

import json

import pytest

import fedman
from fedman.errors import UserError
from fedman.runs import results
from fedman.runs.folder import RunFolder
from fedman.runs.records import headline
from tests.runs.run_records import RECORD, ROW, SUMMARY


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
    nothing, out = tmp_path / "seed0" / "nothing", tmp_path / "all.jsonl"
    with pytest.raises(UserError, match="no finished run here"):
        results.command([nothing], out, False, False)
    assert not out.exists()
    told = results.command([nothing, tmp_path], out, False, False).splitlines()
    assert told[:2] == [f"2 runs in {out}, 2 of them new", f"{nothing}: no finished run here (no summary.json)"]
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


def test_runs_without_the_mean_of_all_last_models_are_those_of_the_servers_model(tmp_path):
    """As on Flower with a robust rule: they were refused."""
    with RunFolder(tmp_path / "run") as folder:
        folder.start(0, SUMMARY["config"])
        for t in (1, 2):
            folder.append(RECORD | {"round": t, "accuracy": {"sel": 60.0, "cloud": 40.0 + t}})
        folder.write_ending(SUMMARY | {"accuracy": {"sel": 60.0, "cloud": 42.0}})
    results.command([tmp_path], tmp_path / "all.jsonl", False, False)
    (row,) = results.read(tmp_path / "all.jsonl")
    assert row["curve"] == {"round": [1, 2], "all": [41.0, 42.0]}
    assert headline(row) == 42.0


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


def made_with(precision, chosen="auto", **keys):
    """A row that was made in a precision, which was asked for or left open."""
    row = ROW | {"precision": precision, "config": ROW["config"] | {"precision": chosen}, **keys}
    return {key: value for key, value in row.items() if value is not None}


def test_a_run_is_the_same_whether_its_precision_was_asked_for_or_left_open():
    asked, open_ = made_with("bf16", "bf16"), made_with("bf16")
    assert results.join([("a", [asked]), ("b", [open_])]) == [asked]
    other = made_with("bf16", accuracy={"all": 60.0})
    with pytest.raises(UserError, match="two results"):
        results.join([("a", [asked]), ("b", [other])])
    assert results.join([("a", [asked]), ("b", [other])], replace=True) == [other]
    assert len(results.join([("a", [asked]), ("b", [made_with("fp32")])])) == 2
    lost = made_with("bf16", diverged="round 1", round=1, accuracy=None)
    assert results.join([("a", [lost]), ("b", [open_])], replace=True) == [open_]


def test_a_diverged_run_records_its_precision(tmp_path):
    with pytest.raises(fedman.errors.Diverged):
        fedman.run(model="mlp", clients=5, epochs=1, lr=1e30, clip=float("inf"), precision="fp32", out=tmp_path)
    assert results.collect(tmp_path)[0]["precision"] == "fp32"


def test_what_no_commit_explains_stays_until_it_is_replaced_by_what_a_commit_does(tmp_path, monkeypatch):
    """Even where the result is the same; and it does not keep committed runs from being added."""
    out, source = tmp_path / "all.jsonl", {"source": {"commit": "a"}}
    rows = {tmp_path: [ROW]}
    monkeypatch.setattr(results, "load", rows.__getitem__)
    results.command([tmp_path], out, replace=False, committed=False)
    other = ROW | source | {"config": ROW["config"] | {"seed": 1}}
    rows[tmp_path] = [other]
    said = results.command([tmp_path], out, replace=False, committed=True)
    assert said.startswith(f"2 runs in {out}, 1 of them new\nno commit has the code of fedavg ζ=0, d iid, seed 0")
    rows[tmp_path] = [ROW | source]
    assert "0 of them new\nno commit" in results.command([tmp_path], out, replace=False, committed=True)
    said = results.command([tmp_path], out, replace=True, committed=True)
    assert said == f"2 runs in {out}, 0 of them new, 1 replaced"
    assert [row["source"] for row in results.read(out)] == [{"commit": "a"}] * 2
    rows[tmp_path] = [ROW]
    assert "replaced" not in results.command([tmp_path], out, replace=True, committed=True)


def test_the_runs_of_all_files_and_folders_below_one(tmp_path):
    fedman.run(model="mlp", clients=5, rounds=1, epochs=1, out=tmp_path / "runs/one")
    results.command([tmp_path], tmp_path / "a/one.jsonl", replace=False, committed=False)
    (tmp_path / "two.jsonl").write_text(json.dumps(ROW) + "\n")
    found = results.parts(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path, _ in found] == ["a/one.jsonl", "two.jsonl", "."]
    assert [len(rows) for _, rows in found] == [1, 1, 1]
    assert [len(rows) for _, rows in results.parts(tmp_path / "two.jsonl")] == [1, 0]
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        results.parts(tmp_path / "nowhere")


def test_runs_of_different_modules_are_not_offered_to_be_replaced():
    one, other = ({**ROW, "inputs": {"model": kind}} for kind in "ab")
    assert len(results.join([("x", [one]), ("y", [other])])) == 1, "the same result"
    other["accuracy"] = {**ROW["accuracy"], "all": 1.0}
    with pytest.raises(UserError, match="of your own under one name; keep them in different files"):
        results.join([("x", [one]), ("y", [other])])
    with pytest.raises(UserError, match="add --replace"):
        results.join([("x", [one]), ("y", [other | {"inputs": {}}])])
