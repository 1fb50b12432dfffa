"""Sweeps from several machines become one; results become one file; what disagrees is refused by name."""

import json
import shutil

import pytest

import fedman
from fedman.cli.commands import main
from fedman.errors import UserError
from fedman.runs import results
from fedman.runs.merge import merge_sweeps

SMALL = {"model": "mlp", "clients": 5, "participation": 0.5, "rounds": 3, "epochs": 1}


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Two machines: both ran a, each another one; the second has half of c."""
    root = tmp_path_factory.mktemp("machines")
    for machine, seeds in {"one": "ab", "two": "ac"}.items():
        for name in seeds:
            fedman.run(**SMALL, seed=ord(name), out=root / machine / name)
    half = root / "two" / "c"
    (half / "summary.json").unlink()
    lines = (half / "rounds.jsonl").read_text().splitlines(keepends=True)
    (half / "rounds.jsonl").write_text("".join(lines[:2]))
    return root


@pytest.fixture
def both(machines, tmp_path):
    shutil.copytree(machines, tmp_path, dirs_exist_ok=True)
    return [tmp_path / "one", tmp_path / "two"], tmp_path / "all"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_identical_runs_once_and_unfinished_ones_too(both):
    sources, out = both
    (sources[1] / "a" / "flatness.json").write_text("{}")
    edit(sources[1] / "a" / "summary.json", seconds=99.0, device="another")
    assert merge_sweeps(sources, out) == f"3 runs in {out}, 2 of them finished; 1 were there more than once"
    assert sorted(p.name for p in out.iterdir()) == ["a", "b", "c"]
    assert (out / "a" / "flatness.json").exists()
    assert (out / "a" / "model.safetensors").read_bytes() == (sources[0] / "a" / "model.safetensors").read_bytes()
    assert len((out / "c" / "rounds.jsonl").read_text().splitlines()) == 2
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    merge_sweeps(sources, out)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_a_finished_run_takes_the_place_of_an_unfinished_one(both):
    sources, out = both
    merge_sweeps([sources[1]], out)
    fedman.run(**SMALL, seed=ord("c"), out=sources[0] / "c")
    merge_sweeps([sources[0]], out)
    assert (out / "c" / "summary.json").exists()


def test_what_disagrees_is_refused_by_name_and_nothing_is_written(both):
    sources, out = both
    edit(sources[1] / "a" / "summary.json", accuracy={"all": 12.5})
    with pytest.raises(UserError, match=r"^a: two results, .* in .*one/a and 12.50 % in .*two/a"):
        merge_sweeps(sources, out)
    assert not out.exists()
    config = sources[1] / "a" / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1\n", "lr = 0.2\n"))
    with pytest.raises(UserError, match=r"^a: .* hold different runs; lr differ"):
        merge_sweeps(sources, out)
    with pytest.raises(UserError, match="nowhere: no run here"):
        merge_sweeps([*sources, out / "nowhere"], out)


def told(capsys, words):
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    captured = capsys.readouterr()
    return stopped.value.code, captured.out + captured.err


def test_merge_and_results_from_the_command_line(both, capsys):
    sources, out = both
    code, said = told(capsys, ["sweep", "--merge", *sources, "--out", out])
    assert code == 0
    assert said.startswith("3 runs in")
    code, said = told(capsys, ["sweep", "--merge", *sources])
    assert code == 2
    assert "--merge: name the folders" in said
    file = out / "all.jsonl"
    assert told(capsys, ["results", sources[1], "--out", file])[1].startswith(f"1 runs in {file}, 1 of them new")
    assert told(capsys, ["results", sources[0], file, "--out", file])[1].startswith(f"2 runs in {file}, 1 of them new")
    rows = results.read(file)
    assert [row["config"]["seed"] for row in rows] == [ord("a"), ord("b")]
    assert all(len(line) < 3000 for line in file.read_text().splitlines())

    before = file.read_bytes()
    edit(sources[0] / "b" / "summary.json", accuracy={"all": 12.5})
    code, said = told(capsys, ["results", sources[0], "--out", file])
    assert code == 2
    assert "fedavg ζ=0, digits dir0.3, seed 98: two results" in said
    assert file.read_bytes() == before
    assert told(capsys, ["results", sources[0], "--out", file, "--replace"])[0] == 0
    assert results.read(file)[1]["accuracy"] == {"all": 12.5}


def test_flatness_is_kept_beside_the_results(both, capsys):
    sources, out = both
    words = ["results", sources[0], "--out", out / "all.jsonl", "--flatness", out / "hessian"]
    code, said = told(capsys, words)
    assert code == 2
    assert "no flatness.json here" in said
    (sources[0] / "a" / "flatness.json").write_text(
        '{"format": 1, "run": {"method": "A", "config": {"lr": 0.123456789}}, '
        '"models": {"all": {"top": {"values": [1.23456789, null, 3], "s": "x"}}}}'
    )
    code, said = told(capsys, words)
    assert code == 0
    assert "flatness of 1 runs" in said
    kept = json.loads((out / "hessian" / "a.flatness.json").read_text())
    assert kept["models"] == {"all": {"top": {"values": [1.2346, None, 3], "s": "x"}}}
    assert kept["run"]["config"] == {"lr": 0.123456789}, "what was asked for stays as it is"
    (sources[0] / "a" / "flatness.json").write_text("{")
    assert "flatness.json: not a JSON file" in told(capsys, words)[1]


GOOD = {
    "config": {
        "dataset": "d", "partition": "iid", "algorithm": "fedavg", "zeta": 0, "seed": 0, "rounds": 2, "clients": 3,
    },
    "accuracy": {"all": 50.0},
    "rounds_to_target": None,
    "curve": {"round": [1, 2], "all": [40.0, 50.0]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": None}, "config is missing"),
        ({"config": {"dataset": "d"}}, "config.partition is missing"),
        ({"config": GOOD["config"] | {"zeta": "much"}}, "config.zeta is missing or not of the right kind"),
        ({"accuracy": {}}, "accuracy.all"),
        ({"accuracy": {"all": float("nan")}}, "accuracy.all"),
        ({"accuracy": {"all": True}}, "accuracy.all"),
        ({"rounds_to_target": "soon"}, "rounds_to_target"),
        ({"curve": {"round": [1], "all": [40.0, 50.0]}}, "as many numbers"),
        ({"curve": {"round": [1, 2], "all": [40.0, "x"]}}, "as many numbers"),
        ({"curve": []}, "curve is missing"),
    ],
)
def test_rows_that_are_no_results(tmp_path, change, message):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(UserError, match=rf"r.jsonl: line 2: .*{message}"):
        results.read(path)


@pytest.mark.parametrize("text", ["{", "[]\n", "3\n", "[" * 100_000, "\n"])
def test_files_that_are_no_results(tmp_path, text):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=r"r\.jsonl: line 1: "):
        results.read(path)


def test_diverged_runs_are_results_too(tmp_path):
    with pytest.raises(fedman.errors.Diverged):
        fedman.run(**SMALL | {"lr": 1e30, "clip": float("inf")}, out=tmp_path / "run")
    (row,) = results.collect([tmp_path])
    assert "not finite" in row["diverged"]
    assert results.join([("a", [row]), ("b", [row])]) == [row]
