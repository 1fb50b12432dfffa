"""Mutation testing: every small fault in the update rules, the MAN term and the screening of updates must fail a test.

    python -m faults.mutation [FILE ...]

A mutant is tried in a process forked from one that has torch and pytest loaded already, so that it costs its tests and
not a start of Python. The tests are those of its file, the ones that name it first, and the first that fails ends it.
(mutmut 3.8 does not run with pytest 9.2 and leaves class attributes alone; cosmic-ray starts Python for every mutant.)
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.mutants import Mutant, mutants
from faults.tally import ROOT, Tally

NEEDED = 0.9
CPU_SECONDS = 300  # of a mutant: one that needs more hangs; all tests of the algorithms take 95


@dataclass
class Target:
    """What is mutated, which tests must notice, and how many did."""

    files: str
    tests: tuple[str, ...]
    functions: tuple[str, ...] = ()  # all, if none is named
    tried: int = 0
    alive: list[str] = field(default_factory=list)


REFERENCE = "backends/test_battery.py"
MAN = ("", "_running", "_left_behind", "_details")
TARGETS = {
    "algorithms": Target(
        "algorithms/*.py", (REFERENCE, "algorithms/test_identities.py", "algorithms/test_registry.py")
    ),
    "the MAN term": Target("penalties/m*.py", tuple(f"penalties/test_man{part}.py" for part in MAN)),
    "screening in the simulator": Target("training/aggregate.py", ("training/test_rounds.py", REFERENCE)),
    "validation part": Target("data/validation.py", ("data/test_validation.py",)),
    "successive halving": Target("runs/tune.py", ("runs/test_tune.py",), ("progress", "Played.score")),
    "aggregation rules": Target("aggregation/*.py", ("aggregation/test_rules.py",)),
    "attacks": Target("training/attacks.py", ("training/test_attacks.py",)),
    "retry after lack of memory": Target(
        "backends/in_process.py", ("backends/test_lack_of_memory.py",), ("InProcess._make_room",)
    ),
    "screening on Flower": Target("flower/screen.py", ("flower/test_screen.py",)),
}


def run(tally: Tally, scratch: Path, small: bool = False) -> None:
    """The score, from a process that has not imported the package."""
    report = scratch / "mutation.json"
    files = ["fedavg.py"] if small else []
    words = [sys.executable, "-m", "faults.mutation", f"--json={report}", *files]
    subprocess.run(words, cwd=ROOT, check=True, preexec_fn=lambda: os.nice(19))
    for name, (tried, alive) in json.loads(report.read_text()).items():
        killed = tried - len(alive)
        what = f"mutants of {name} killed ({NEEDED:.0%} wanted)"
        tally.count(what, killed, tried, [] if killed >= NEEDED * tried else alive)
        tally.note(what, f"{killed / tried:.1%}")


def main(words: list[str]) -> None:
    """Try all mutants, or those of the files named; print who lives."""
    report = next((word.removeprefix("--json=") for word in words if word.startswith("--json=")), None)
    chosen = [word for word in words if not word.startswith("--")]
    preload()
    scores = {}
    for name, target in TARGETS.items():
        for path in sorted((ROOT / "src" / "fedman").glob(target.files)):
            if not chosen or path.name in chosen:
                mutate(target, path)
        if target.tried:
            scores[name] = target.tried, target.alive
    if report is not None:
        Path(report).write_text(json.dumps(scores))


def mutate(target: Target, path: Path) -> None:
    """All mutants of one file."""
    found = list(mutants(path, target.functions))
    if os.waitpid(fork(None, path, target.tests), 0)[1]:
        raise SystemExit(f"faults.mutation: {' '.join(target.tests)} fail without any mutant")
    alive = []
    for mutant, lives in each(found, path, target.tests):
        if lives:
            alive.append(f"{path.relative_to(ROOT)}:{mutant.line}: {mutant.what}")
            print(f"alive: {alive[-1]}", file=sys.stderr, flush=True)
    target.tried += len(found)
    target.alive += alive
    print(f"{path.name}: {len(found) - len(alive)} of {len(found)} mutants killed", file=sys.stderr, flush=True)


def preload() -> None:
    """All that the tests import and that no mutant changes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp()  # examples that fail are the mutants', not ours
    os.chdir(ROOT)
    for name in ("pytest", "numpy", "hypothesis.strategies", "torch._dynamo", "safetensors.torch"):
        importlib.import_module(name)
    assert not any(name.split(".")[0] == "fedman" for name in sys.modules), "the package is loaded already"


def each(found: list[Mutant], path: Path, tests: tuple[str, ...]) -> Iterator[tuple[Mutant, bool]]:
    """Every mutant and whether it lives; as many at once as there are cores."""
    jobs: dict[int, Mutant] = {}
    waiting = found[::-1]
    while waiting or jobs:
        while waiting and len(jobs) < len(os.sched_getaffinity(0)):
            mutant = waiting.pop()
            jobs[fork(mutant, path, tests)] = mutant
        pid, status = os.waitpid(-1, 0)
        yield jobs.pop(pid), status == 0


def fork(mutant: Mutant | None, path: Path, tests: tuple[str, ...]) -> int:
    """A process that ends with 0 if the tests pass on the mutant."""
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        if mutant is not None:
            install(mutant, path)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "-W", "ignore"]
        code = int(pytest.main([*options, *(f"tests/{name}" for name in tests)], [Order(path)]))
    finally:
        os._exit(code)


class Order:
    """A pytest plugin: without tests of other algorithms; those that name the file first, the slow compiler's last."""

    def __init__(self, path: Path) -> None:
        self.name, self.others = path.stem, {other.stem for other in path.parent.glob("*fed*.py")} - {path.stem}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        def alien(words: str) -> bool:
            return "fed" in self.name and self.name not in words and any(o in words for o in self.others)

        def words(item: Any) -> str:
            return str(item.nodeid).lower().replace("-", "")  # fedlesam-d is in fedlesamd.py

        items[:] = [item for item in items if not alien(words(item))]
        items.sort(key=lambda item: ("compile" in item.nodeid, self.name not in words(item)))


def install(mutant: Mutant, path: Path) -> None:
    """The mutant's code in the place of its file's, when that is imported."""
    loader: Any = importlib.machinery.SourceFileLoader
    before: Callable[..., Any] = loader.get_code

    def get_code(self: Any, name: str) -> Any:
        return mutant.code if Path(self.path) == path else before(self, name)

    loader.get_code = get_code


if __name__ == "__main__":
    main(sys.argv[1:])
