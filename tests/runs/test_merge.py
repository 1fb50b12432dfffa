"""Sweeps from several machines become one folder, their results one file; what disagrees is refused by name."""

import json
import shutil

import pytest

import fedman
from fedman.cli.commands import main
from fedman.errors import UserError
from fedman.runs import results
from fedman.runs.folder import RunFolder
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
    for name in ("summary.json", "manifest.json"):
        (half / name).unlink()
    lines = (half / "rounds.jsonl").read_text().splitlines(keepends=True)
    (half / "rounds.jsonl").write_text("".join(lines[:2]))
    return root


@pytest.fixture
def both(machines, tmp_path):
    shutil.copytree(machines, tmp_path, dirs_exist_ok=True)
    return [tmp_path / "one", tmp_path / "two"], tmp_path / "all"


def edit(path, **changes):
    """Change a summary, as if the run had ended so; it cannot be told that it has not."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (path.parent / "manifest.json").unlink(missing_ok=True)


def test_identical_runs_once_and_unfinished_ones_too(both):
    sources, out = both
    (sources[1] / "a" / "flatness.json").write_text("{}")
    edit(sources[1] / "a" / "summary.json", seconds=99.0, device="another")
    said = f"3 runs in {out}, 2 of them finished; 1 were there more than once"
    old = f"{sources[1] / 'a'} and 1 more"
    assert merge_sweeps(sources, out) == f"{said}\nnot checked, as earlier versions wrote no checksums: {old}"
    assert "flatness.json" in RunFolder(out / "a").check()
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
    edit(sources[1] / "a" / "summary.json")
    config = sources[1] / "a" / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1\n", "lr = 0.2\n"))
    with pytest.raises(UserError, match=r"^a: .* hold different runs; lr differ"):
        merge_sweeps(sources, out)
    with pytest.raises(UserError, match="nowhere: no run here"):
        merge_sweeps([*sources, out / "nowhere"], out)


@pytest.mark.parametrize("name", ["config.toml", "rounds.jsonl", "summary.json", "model.safetensors"])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_damaged_runs_are_not_merged(both, name, how):
    sources, out = both
    path = sources[0] / "b" / name
    path.write_bytes(path.read_bytes()[:-20])
    if how == "gone":
        path.unlink()
    with pytest.raises(UserError, match=rf"^{path}: (damaged|is missing)"):
        merge_sweeps(sources, out)
    assert not out.exists()


def test_links_in_a_run_are_not_merged(both):
    sources, out = both
    (sources[0] / "b" / "notes").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match=r"b/notes: is a symbolic link, which is not followed"):
        merge_sweeps(sources, out)
    assert not out.exists()


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
