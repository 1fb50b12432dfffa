"""Mutation testing: every small fault in the update rules, the MAN term and the screening of updates must fail a test.

    python -m faults.mutation [FILE ...]

A mutant is tried in a process forked from one that has torch and pytest loaded already, so that it costs its tests and
not a start of Python. The tests are those of its file, the sharpest first, and the first that fails ends it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from faults.mutants import Mutant, mutants
from faults.tally import ROOT, Tally

SOURCE = ROOT / "src" / "fedman"
SCREENING = ("Engine.round", "Engine.close", "weighted_sum", "play")
ALGORITHM_TESTS = (
    "algorithms/test_against_reference.py",
    "algorithms/test_identities.py",
    "algorithms/test_registry.py",
)
TARGETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # files: the functions (all, if none is named), the tests
    "algorithms/*.py": ((), ALGORITHM_TESTS),
    "man.py": ((), ("test_man.py",)),
    "engine.py": (SCREENING, ("test_engine.py", "algorithms/test_against_reference.py")),
}
NEEDED = 0.9
CPU_SECONDS = 120  # of a mutant: one that needs more hangs


def run(tally: Tally, scratch: Path) -> None:
    """The score, from a process that has not imported the package."""
    report = scratch / "mutation.json"
    code = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-m", "faults.mutation", "--json", str(report)])
    if code:
        tally.count("mutants killed", 0, 1, ["mutation testing did not finish"])
        return
    for name, score in json.loads(report.read_text()).items():
        tried, killed, alive = score["tried"], score["killed"], score["alive"]
        enough = killed >= NEEDED * tried
        tally.count(f"mutants of {name} killed, {NEEDED:.0%} wanted", killed, tried, [] if enough else alive)


def main(words: list[str]) -> None:
    """Try all mutants, or those of the files named; print who lives."""
    path = Path(words.pop(words.index("--json") + 1)) if "--json" in words else None
    chosen = [word for word in words if word != "--json"]
    preload()
    scores: dict[str, dict[str, Any]] = {}
    for pattern, (functions, tests) in TARGETS.items():
        files = [p for p in sorted(SOURCE.glob(pattern)) if not chosen or p.name in chosen]
        found = [m for file in files for m in mutants(file, functions)]
        if not found:
            continue
        if not survives(None, tests):
            raise SystemExit(f"faults.mutation: {' '.join(tests)} fail without any mutant")
        started = time.monotonic()
        alive = [str(m.relative(ROOT)) for m, lives in each(found, tests) if lives]
        scores[pattern] = {"tried": len(found), "killed": len(found) - len(alive), "alive": alive}
        for line in alive:
            print(f"alive: {line}")
        seconds = time.monotonic() - started
        print(f"{pattern}: {len(found) - len(alive)} of {len(found)} killed, {seconds:.0f} s", flush=True)
    if path is not None:
        path.write_text(json.dumps(scores))


def preload() -> None:
    """All that the tests import and that no mutant changes."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp()  # examples that fail are the mutants', not ours
    os.nice(19)
    for name in ("pytest", "numpy", "hypothesis.strategies", "torch._dynamo", "safetensors.torch"):
        importlib.import_module(name)
    assert not any(name.split(".")[0] == "fedman" for name in sys.modules), "the package is loaded already"


def each(found: Iterable[Mutant], tests: tuple[str, ...]) -> Iterator[tuple[Mutant, bool]]:
    """Every mutant and whether it lives; as many at once as there are cores."""
    jobs: dict[int, Mutant] = {}
    waiting = list(found)[::-1]
    while waiting or jobs:
        while waiting and len(jobs) < len(os.sched_getaffinity(0)):
            mutant = waiting.pop()
            jobs[fork(mutant, tests)] = mutant
        pid, status = os.waitpid(-1, 0)
        yield jobs.pop(pid), status == 0


def survives(mutant: Mutant | None, tests: tuple[str, ...]) -> bool:
    """Whether the tests pass."""
    return os.waitpid(fork(mutant, tests), 0)[1] == 0


def fork(mutant: Mutant | None, tests: tuple[str, ...]) -> int:
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
            install(mutant)
        code = int(pytest_main(tests))
    finally:
        os._exit(code)


def pytest_main(tests: tuple[str, ...]) -> int:
    import pytest

    os.chdir(ROOT)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "-W", "ignore"]
    return pytest.main([*options, *(f"tests/{name}" for name in tests)])


def install(mutant: Mutant) -> None:
    """The mutant's code in the place of its file's, when that is imported."""
    loader: Any = importlib.machinery.SourceFileLoader
    before: Callable[..., Any] = loader.get_code

    def get_code(self: Any, name: str) -> Any:
        return mutant.code if Path(self.path) == mutant.path else before(self, name)

    loader.get_code = get_code


if __name__ == "__main__":
    main(sys.argv[1:])
