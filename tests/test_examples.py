"""The examples run and show what they say; docs/bring-your-own.md prints them as they are, and its commands work."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import fedman
from fedman.config import PARTS
from tests.cli.command_line import main_ok

ROOT = Path(__file__).parent.parent
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
PAGE = (ROOT / "docs/bring-your-own.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^fedman (.*)$", "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)), re.MULTILINE)


def test_the_page_prints_every_example():
    printed = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert sorted(printed) == sorted(path.read_text(encoding="utf-8") for path in EXAMPLES.values())
    for path in EXAMPLES.values():
        assert len(path.read_text(encoding="utf-8").splitlines()) < 60


def test_the_page_names_all_of_a_contract():
    for section, base in (("Task", fedman.Task), ("Optimiser", fedman.LocalOptimizer)):
        rows = re.findall(r"^\| `(\w+)` \|", PAGE.split(f"## {section}\n")[1].split("\n## ")[0], re.MULTILINE)
        assert set(rows) == {name for name in {**vars(base), **base.__annotations__} if not name.startswith("_")}
    for registry in PARTS.values():
        assert f"`fedman.{registry.base.__name__}`" in PAGE
        assert f"`{registry.group}`" in PAGE


@pytest.fixture
def printed(capsys, tmp_path, monkeypatch):
    """Runs an example as a script, from an empty folder: the numbers in what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(name):
        runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
        assert not list(tmp_path.iterdir())
        return capsys.readouterr().out

    return run


def test_own_algorithm(printed):
    """Momentum is faster at first."""
    plain, momentum = re.findall(r"an accuracy of ([\d.]+) %", printed("own_algorithm"))
    assert float(momentum) > float(plain) + 5


def test_own_task(printed):
    squared, huber = re.findall(r"error ([\d.]+) without outliers", printed("own_task"))
    assert float(huber) < float(squared) / 2


def test_own_penalty(printed):
    text = printed("own_penalty")
    assert re.findall(r"^(FedAvg\S*):", text, re.MULTILINE) == ["FedAvg", "FedAvg+CP"]
    plain, penalised = re.findall(r"entropy while training ([\d.]+)", text)
    assert float(penalised) > float(plain) + 0.2


def test_own_optimizer(printed):
    text = printed("own_optimizer")
    assert "SignSGD(memory=0.9): accuracy" in text
    assert all(float(accuracy) > 50 for accuracy in re.findall(r"accuracy ([\d.]+) %", text))


def test_own_model(printed):
    text = printed("own_model")
    assert "FedAvg+MAN on digits" in text
    shown, taken = (row.split(", ") for row in re.findall(r"\[([\d, ]+)\]", text))
    assert sum(a == b for a, b in zip(shown, taken, strict=True)) >= 8


def test_own_clients(printed):
    text = printed("own_clients")
    assert "8 clients (natural)" in text
    each = [float(a) for a in re.findall(r"writer \d: ([\d.]+) % of its own", text)]
    assert len(each) == 8
    mean, worst, spread = map(float, re.search(r"mean (\S+) %, worst tenth (\S+) %, spread (\S+)", text).groups())
    assert mean == pytest.approx(np.mean(each), abs=0.1)
    assert worst == min(each)
    assert spread == pytest.approx(np.std(each), abs=0.1)
    mixed, natural = map(float, re.search(r"in turns: accuracy (\S+) %, not (\S+) %", text).groups())
    assert mixed > natural


@pytest.mark.filterwarnings("ignore:clients are trained one after the other")
def test_text(printed):
    text = printed("text")
    assert "99 clients (natural)" in text
    assert "perplexity" in text
    learnt, always = map(float, re.search(r"predicts (\S+) % .* right in (\S+) %", text).groups())
    assert learnt > always + 5


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page(command, tmp_path, monkeypatch):
    """From the folder of the examples, which is not on the path."""
    for path in EXAMPLES.values():
        shutil.copy(path, tmp_path)
        monkeypatch.setitem(sys.modules, path.stem, None)
        del sys.modules[path.stem]  # what is imported here is forgotten at the end
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(50, 2))
    np.savez("mine.npz", x_train=x, y_train=x[:, :1], x_test=x, y_test=x[:, :1])
    few = [] if "clients=" in command else ["clients=6", "participation=0.5"]
    main_ok([*command.split(), *few, "epochs=1", "--out", "out", "--device", "cpu"])
    assert list(tmp_path.glob("out/**/summary.json"))


def test_all_parts_are_on_the_command_line_of_the_page():
    assert len(COMMANDS) == 6
    for name in set(EXAMPLES) - {"own_clients", "text"}:
        assert any(f"={name}:" in command for command in COMMANDS)
