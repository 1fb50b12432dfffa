"""A slice of the fault harness, every section of it, and checks that the harness itself can fail."""

import ast
import json
import signal
import tomllib

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from faults import __main__ as harness
from faults import determinism, disk, kill, runs, settings, supply
from faults.mutants import mutants
from faults.tally import Row, Tally

LONG = (
    "determinism", "disk", "files", "finished", "kill", "many", "mutation", "numerics", "orphans", "supply", "symlinks",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in harness.SECTIONS]
)
def test_a_slice_of_every_section(name):
    rows = harness.section(name, small=True)
    assert [f"{row.what}: {failure}" for row in rows for failure in row.failures] == []
    assert all(row.held == row.tried for row in rows)
    assert sum(row.tried for row in rows) > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("algorithm", ["fedavg", "feddc", "fedspeed"])
def test_the_same_seed_twice_on_cuda(algorithm):
    first, again = (determinism.play(algorithm, device="cuda") for _ in range(2))
    assert determinism.apart(first, again) < determinism.CUDA


def test_table_json_and_exit_code(monkeypatch, capsys):
    rows = [Row("disk", "what was tried", 3, 2, ["the third"], "a note"), Row("disk", "more", 10, 10)]
    monkeypatch.setattr(harness, "section", lambda name: rows)
    assert harness.main(["disk"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["section", "what", "tried", "held", "failed", "note"]
    assert lines[1].split("  ")[-1] == "a note"
    assert lines[1].replace("a note", "").split()[-3:] == ["3", "2", "1"]
    assert "failed: disk: what was tried: the third" in lines
    assert [row["held"] for row in json.loads(lines[-1])["faults"]] == [2, 10]
    rows[0].failures.clear()
    assert harness.main(["disk"]) == 0
    assert harness.main(["disks"]) == 2


def test_a_section_that_fails_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(disk, "run", lambda *_: 1 / 0)
    assert harness.section("disk")[0].failures == ["ZeroDivisionError: division by zero"]


def test_a_run_that_differs_is_noticed(tmp_path):
    """Another seed in the place of a resumed run: all three hashes differ, and the tally says so."""
    words = ["run", *runs.SMALL, "rounds=2", "--device", "cpu", "--out"]
    for seed in (0, 1):
        assert runs.complete([*words, str(tmp_path / f"{seed}"), f"seed={seed}"], tmp_path / "log") is None
    whole = runs.fingerprint(tmp_path / "0")
    assert runs.different(tmp_path / "0", whole) is None
    assert "weights, records, summary differ" in runs.different(tmp_path / "1", whole)
    assert "exit 2" in runs.complete(["run", "zeta=-1"], tmp_path / "log")


def test_a_process_dies_at_the_operation_asked_for(tmp_path):
    words = ["run", *runs.SMALL, "rounds=2", "checkpoint_seconds=0", "--device", "cpu", "--out"]
    died = []
    for n in (2, 30):
        out = tmp_path / str(n)
        process = runs.start([*words, str(out)], tmp_path / "log", kill.die_at, n, str(out))
        assert runs.finish(process) == -signal.SIGKILL
        died.append({p.name.partition(".")[0] for p in out.rglob("*") if not p.name.startswith(".")})
    assert "config" not in died[0]
    assert "config" in died[1]


def test_refusals_are_looked_at_closely(capsys):
    assert "was accepted" in settings.refused(["run", "zeta=0.1", "--device", "nowhere"])
    assert settings.refused(["run", "zeta=0.1", "--device", "nowhere"], may_pass=True) is None
    assert "exit 0" in settings.refused(["list"])
    assert settings.refused(["run", "zeta=-1"]) is None


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import yaml", "eval('1')", "exec('x')", "torch.load(p)",
        "torch.load(p, weights_only=False)", "np.load(p, allow_pickle=True)", "os.system('ls')", "import socket",
        "subprocess.run('ls', shell=True)", "import urllib.request",
    ],
)  # fmt: skip
def test_forbidden_lines_are_found(line):
    assert [number for number, _ in supply.forbidden(f"x = 1\n{line}\n")] == [2]
    assert not list(supply.forbidden("model.eval()\ntorch.load(p, weights_only=True)\nre.compile('a')\n"))


def test_unpinned_packages_are_found(monkeypatch, tmp_path):
    for name in ("constraints.txt", "pyproject.toml"):
        text = (supply.ROOT / name).read_text()
        (tmp_path / name).write_text(text.replace("numpy==", "numpy==0.").replace("\nrich==", "\n#rich=="))
    monkeypatch.setattr(supply, "ROOT", tmp_path)
    problems = {name: problem for name, problem in supply.pins() if problem}
    assert set(problems) == {"numpy", "rich"}
    assert problems["rich"] == "is not pinned"


def test_extras_that_are_not_installed_here_are_pinned_too():
    """mlflow and wandb: `supply.pins` can see no further than what is installed."""
    extras = tomllib.loads((supply.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {canonicalize_name(Requirement(r).name) for extra in extras.values() for r in extra}
    lines = (supply.ROOT / "constraints.txt").read_text().split()
    assert wanted <= {canonicalize_name(line.partition("==")[0]) for line in lines}


def test_mutants(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        '"""Docstring."""\n\n\ndef f(a: int = 1) -> str:\n    """More."""\n    if a > 2 and not a:\n'
        '        return "x"\n'
        '    raise ValueError("left alone")\n\n\ndef g(b):\n    return b + 1\n'
    )
    found = [m.what for m in mutants(path)]
    wanted = ["1 -> 2", "a > 2 -> a >= 2", "2 -> 3", "not a -> a", "'x' -> 'xx'", "return b + 1 -> return None",
              "b + 1 -> b - 1", "a > 2 and (not a) -> a > 2 or not a"]  # fmt: skip
    assert set(wanted) <= set(found)
    assert not any("Docstring" in w or "left alone" in w for w in found)
    assert {m.what for m in mutants(path, ("g",))} == {"return b + 1 -> return None", "b + 1 -> b - 1", "1 -> 2"}
    for mutant in mutants(path, ("g",)):
        names: dict = {}
        exec(mutant.code, names)
        assert names["g"](5) != 6
    with pytest.raises(LookupError, match="has no h"):
        list(mutants(path, ("h",)))
    assert ast.parse(path.read_text())


def test_a_tally_counts():
    tally = Tally("s")
    tally.check("a", None)
    tally.check("a", "wrong")
    tally.count("a", 3, 4, ["also"])
    assert tally.row("a") == Row("s", "a", 6, 4, ["wrong", "also"])
