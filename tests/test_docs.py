"""What the documents print runs as printed."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", PYTHON, ids=["regulariser", "federation"])
def test_readme_python(code, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_readme_commands_exist():
    """The make targets and every `fedman` command line of the README parse."""
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile
    from fedman.config import overrides
    from fedman.paper.presets import find_sweep
    from fedman.runs.grid import cells

    lines = re.findall(r"^fedman (?:run|sweep) (.*?)(?:  #.*)?$", README, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        words = line.split()
        preset = words[words.index("--preset") + 1]
        assert cells(overrides(w for w in words if "=" in w), find_sweep(preset))


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "results/README.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_algorithm_files_stay_short():
    for path in (ROOT / "src/fedman/algorithms").glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 100


def test_the_algorithm_of_the_page_runs_as_printed(tmp_path, monkeypatch):
    import fedman
    from fedman.algorithms import ALGORITHMS

    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    (tmp_path / "fedavgm.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ALGORITHMS, "fedavgm", importlib.import_module("fedavgm").FedAvgM)
    keys = {"clients": 4, "participation": 0.5, "rounds": 3, "epochs": 1}
    plain = fedman.run(**keys).models["cloud"]
    for beta, same in ((0.0, True), (0.9, False)):
        w = fedman.run(algorithm="fedavgm", beta=beta, **keys).models["cloud"]
        assert all(w[name].allclose(plain[name], atol=1e-5) for name in plain) is same


def test_the_page_of_algorithms_names_what_exists():
    from fedman.algorithms import ALGORITHMS, Algorithm

    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| .*(?:w|Fed)", page, re.MULTILINE)) >= set(ALGORITHMS)
    part = page.split("What an algorithm can define")[1]
    for name in re.findall(r"^\| `(\w+)`", part, re.MULTILINE):
        assert name in vars(Algorithm) or name in Algorithm.__annotations__
    for path in re.findall(r"`((?:src|tests)/[\w/.]+)`", page):
        assert (ROOT / path).exists() or path.endswith("fedavgm.py"), path
