"""The house: layers of imports, names in their places, the path of a round as docs/architecture.md lists it."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import threading
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from fedman.algorithms import ALGORITHMS
from fedman.data import SPECS
from fedman.models import MODELS
from tests.import_layers import PACKAGE, back_edges, cycles, graph, modules

PAGE = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_imports_go_down():
    assert back_edges(graph()) == []


def test_no_circle_of_modules():
    assert cycles(graph()) == []


def test_few_modules_at_the_root():
    assert len(list(PACKAGE.glob("[a-z]*.py"))) <= 10


@pytest.mark.parametrize("name", modules())
def test_every_module_says_what_it_is_for(name):
    doc = ast.get_docstring(ast.parse(modules()[name].read_text(encoding="utf-8")))
    assert doc
    assert "§" not in doc


def test_no_mock_in_the_package():
    assert [name for name, path in modules().items() if "unittest" in path.read_text(encoding="utf-8")] == []


def test_names_stay_in_their_places():
    """No algorithm, data set or model by name outside its own file, the registry and the paper."""
    names = {*ALGORITHMS, *SPECS, *MODELS}
    at_home = {"algorithms", "data", "models", "paper"}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for path in modules().values()
        if path.relative_to(PACKAGE).parts[0] not in at_home
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert found == []


def resolved(dotted: str):
    """The module, class or function of a dotted name."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return found
    raise AssertionError(dotted)


NAMED = sorted(set(re.findall(r"`(fedman(?:\.\w+)+)`", PAGE)))


@pytest.mark.parametrize("name", [n for n in NAMED if ".flower" not in n])
def test_the_page_names_what_exists(name):
    if name != "fedman.run":
        assert resolved(name)


@pytest.mark.parametrize("name", [n for n in NAMED if ".flower" in n])
def test_the_page_names_what_exists_on_flower(name):
    pytest.importorskip("flwr")
    assert resolved(name)


@cache
def classes() -> set[str]:
    """The names of the package's classes."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in modules().values())
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("word", sorted(set(re.findall(r"`([A-Z]\w+)(?:\.\w+)?(?:\(.*?\))?`", PAGE))))
def test_the_page_names_classes_that_exist(word):
    assert word in classes() | {"MAN"}


def hops(title: str) -> list[str]:
    """The numbered functions of a part of the page."""
    part = PAGE.split(f"**{title}**")[1].split("**")[0].split("##")[0]
    return re.findall(r"^\d+\. `([\w.]+)`", part, re.M)


@contextmanager
def walked(names: list[str]):
    """Which of these functions are entered, each after the one before it."""
    codes = {getattr(resolved(name), "__wrapped__", resolved(name)).__code__: name for name in names}
    entered: list[str] = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code in codes and codes[frame.f_code] == names[len(entered) % len(names)]:
            entered.append(codes[frame.f_code])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


SMALL = "algorithm=fedavg clients=4 participation=0.5 rounds=2 epochs=1 batch_size=500"


def test_a_round_on_a_cpu_takes_the_listed_path(tmp_path):
    from fedman.cli import main

    names = hops("In this process, on a CPU")
    assert len(names) <= 8
    with walked(names) as entered, pytest.raises(SystemExit, match=r"^0$"):
        main(["run", *SMALL.split(), "--out", str(tmp_path / "run"), "--device", "cpu"])
    assert entered[: len(names)] == names


def test_a_round_of_stacked_runs_takes_the_listed_path(tmp_path, monkeypatch):
    """With graphs that only take the steps."""
    from fedman.cli import main
    from fedman.execution.executor import Executor
    from fedman.runs import build
    from tests.federations import Loop

    graphs = Loop()
    monkeypatch.setattr(build, "Executor", lambda *given: Executor(*given, graphs))
    names = hops("Several runs stacked on a GPU")
    assert len(names) <= 8
    with walked(names) as entered, pytest.raises(SystemExit, match=r"^0$"):
        main(["sweep", *SMALL.split(), "seed=0,1", "--out", str(tmp_path), "--device", "cpu"])
    assert entered[: len(names)] == names
    assert max(graphs.sizes) >= 2


def test_a_round_on_flower_takes_the_listed_path(tmp_path):
    pytest.importorskip("flwr")
    from flwr.app import Context, RecordDict

    from fedman.flower import app
    from tests.flower.local_grid import LocalGrid

    names = hops("On Flower")
    assert len(names) <= 8
    given = {"preset": "", "settings": f"{SMALL} wait=1", "out": str(tmp_path / "out"), "resume": False}
    context = Context(1, 1, {}, RecordDict(), given)
    with walked(names) as entered:
        app.main(LocalGrid.of(4, tmp_path / "memory"), context)
    assert entered[: len(names)] == names
