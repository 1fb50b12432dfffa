"""Figures from `flatness.json` alone."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.paper.flatness.flatness_calls import flatness


@pytest.mark.slow
def test_pictures_are_drawn_from_the_file_alone(runs, capsys):
    """Measured where there is no matplotlib, drawn elsewhere."""
    words = ["flatness", "plain", "man", "--top", "4", "--density", "--steps", "10", "--layers", "--clients",
             "--landscape", "--points", "3", "--device", "cpu"]  # fmt: skip
    code = "import sys, importlib.util as u; find = u.find_spec; sys.modules['matplotlib'] = None\n"
    code += "u.find_spec = lambda name: None if name == 'matplotlib' else find(name)\n"
    code += f"from fedman.cli.commands import main; main({words})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no pictures: matplotlib is not installed" in done.stdout
    assert not list(runs.glob("*.png"))
    elsewhere = runs / "elsewhere"
    for name in ("plain", "man"):
        (elsewhere / name).mkdir(parents=True)
        shutil.copy(runs / name / "flatness.json", elsewhere / name)
    flatness("--plot", str(elsewhere / "plain"), str(elsewhere / "man"))
    assert "written to" in capsys.readouterr().out
    names = {p.name for p in elsewhere.glob("flatness-*")}
    kinds = ("top", "density", "landscape", "layers", "clients")
    assert names == {f"flatness-{kind}.{end}" for kind in kinds for end in ("png", "svg")}
    flatness("--plot", "man", "--out", "one")
    assert (runs / "one/flatness-density.svg").exists()
