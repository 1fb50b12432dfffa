"""The notebooks run from top to bottom, in an empty folder, and are stored without outputs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.ipynb"))}


def code(notebook):
    """The code cells as one script: they use no magic commands and show what they print."""
    return "\n\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_without_outputs_and_with_links_that_lead_somewhere(name):
    cells = NOTEBOOKS[name]["cells"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if "outputs" in cell)
    assert len({cell["id"] for cell in cells}) == len(cells)
    for link in re.findall(r"\]\(([^)#]+)\)", "".join("".join(cell["source"]) for cell in cells)):
        assert (FOLDER / link).exists(), link


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "printed", "written"),
    [
        ("man_in_your_own_loop", [r"with MAN .* λ_max"], ["profiles.png", "profiles.svg"]),
        ("federated_experiment", [r"FedDC\+MAN", r"HalfStep\+MAN on digits", "did you mean fedavg"], ["curves.png"]),
    ],
)
def test_a_notebook_runs(name, printed, written, tmp_path):
    environment = {**os.environ, "MPLBACKEND": "agg"}
    script = [sys.executable, "-c", code(NOTEBOOKS[name])]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in printed:
        assert re.search(words, done.stdout), done.stdout
    for file in written:
        assert (tmp_path / file).stat().st_size > 0


def test_every_notebook_is_run():
    (parameters,) = (mark for mark in test_a_notebook_runs.pytestmark if mark.name == "parametrize")
    assert [name for name, *_ in parameters.args[1]] == sorted(NOTEBOOKS, reverse=True)
