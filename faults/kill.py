"""Kill: a run ended at any moment goes on to the same weights, records, summary and table, bit for bit."""

from __future__ import annotations

import itertools
import os
import random
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

from faults.runs import (
    SMALL,
    complete,
    different,
    end,
    fingerprint,
    finish,
    on_operations,
    resumed,
    rounds_done,
    sha256,
    start,
    tail,
    wait_until,
)
from faults.tally import Tally
from fedman.algorithms import ALGORITHMS

ALWAYS = ("checkpoint_seconds=0", "--device", "cpu")
ZETAS = ("0", "0.15")
ROUNDS = 30


def run(tally: Tally, scratch: Path, small: bool = False) -> None:
    """Random moments for each algorithm, every file operation of one run, a sweep, and the polite signals."""
    rng = random.Random(0)
    for algorithm in list(ALGORITHMS)[4:5] if small else ALGORITHMS:
        for zeta in ZETAS[1:] if small else ZETAS:
            folder = scratch / f"{algorithm}-{zeta}"
            folder.mkdir()
            words = ["run", *SMALL, *ALWAYS, f"algorithm={algorithm}", f"zeta={zeta}", f"rounds={ROUNDS}"]
            whole = reference(folder, words)
            random_moments(tally, folder, words, whole, 2 if small else 7, rng)
            polite(tally, folder, words, whole, rng)
    crash_points(tally, scratch, small)
    sweep(tally, scratch, 2 if small else 12, rng)


def reference(folder: Path, words: list[str]) -> dict[str, str]:
    """The fingerprint of the run that nothing interrupts."""
    problem = complete([*words, "--out", str(folder / "whole")], folder / "whole.log")
    if problem:
        raise RuntimeError(problem)
    return fingerprint(folder / "whole")


def random_moments(
    tally: Tally, folder: Path, words: list[str], whole: dict[str, str], kills: int, rng: random.Random
) -> None:
    """One run killed over and over: in the start, in a round, in a write; then left to end."""
    out, log = folder / "killed", folder / "killed.log"
    words = [*words, "--out", str(out)]
    done = 0
    for _ in range(kills):
        process = start(resumed(words, out), log)
        moment, pause = rounds_done(out) + rng.randint(0, 3), rng.uniform(0, 0.08)
        wait_until(process, lambda moment=moment: rounds_done(out) >= moment)  # type: ignore[misc]
        time.sleep(pause)
        done += end(process, signal.SIGKILL) == -signal.SIGKILL
    problem = complete(resumed(words, out), log) or different(out, whole)
    what = "kill -9 at random moments, each algorithm with and without MAN: the same sha256 of all"
    tally.count(what, 0 if problem else done, done, [problem] if problem else [])


def polite(tally: Tally, folder: Path, words: list[str], whole: dict[str, str], rng: random.Random) -> None:
    """SIGTERM, Ctrl-C and SIGHUP: a checkpoint, exit 143, 130 or 129, and a line that says how to go on."""
    for how in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        out, log = folder / how.name, folder / f"{how.name}.log"
        moment = f"round-{rng.randint(1, ROUNDS // 2):06d}"
        code = finish(start([*words, "--out", str(out)], log, ask_at, moment, how, str(out)))
        line = tail(log)
        _, sign, command = line.partition("go on with: fedman ")
        if code != 128 + how:
            problem: str | None = f"exit {code}, not {128 + how}: {line}"
        elif not sign:
            problem = f"no line that says how to go on: {line}"
        else:
            problem = complete(shlex.split(command), log) or different(out, whole)
        tally.check(f"{how.name} saves, exits {128 + how}, says how to go on", problem)


def ask_at(name: str, how: int, out: str) -> None:
    """Send this process a signal in its first operation on a file of this name: one from outside could come late."""
    first = iter([True])

    def operation(event: str, path: str) -> None:
        if name in path and next(first, False):
            os.kill(os.getpid(), how)

    on_operations(out, operation)


def crash_points(tally: Tally, scratch: Path, small: bool) -> None:
    """A run of three rounds killed in its n-th operation on a file of its folder, for every n."""
    folder = scratch / "crash"
    folder.mkdir()
    words = ["run", *SMALL, *ALWAYS, "algorithm=feddc", "zeta=0.15", "rounds=3"]
    whole = reference(folder, words)
    n = 0
    while True:
        n += 9 if small else 1
        out, log = folder / str(n), folder / f"{n}.log"
        code = finish(start([*words, "--out", str(out)], log, die_at, n, str(out)))
        if code == 0:
            return  # the run has fewer operations
        if code != -signal.SIGKILL:
            raise RuntimeError(f"point {n}: exit {code}: {tail(log)}")
        problem = complete(resumed([*words, "--out", str(out)], out), log) or different(out, whole)
        left = [p.name for p in out.rglob("*") if p.name not in RESULTS]
        problem = problem or (f"point {n}: left behind {', '.join(left)}" if left else None)
        tally.check("kill -9 in every file operation, also half-way through a checkpoint's write", problem)


RESULTS = {
    *(".lock", "config.toml", "rounds.jsonl", "summary.json", "model.safetensors", "manifest.json"),
    *("checkpoint", "clients.rows", "round-000003.json", "round-000003.safetensors"),
}


def die_at(n: int, out: str) -> None:
    """Kill this process in its n-th operation on a file under `out`.

    What lies there staged has not reached the disk for sure: at every other n it is cut in half.
    """
    count = itertools.count(1)

    def operation(event: str, path: str) -> None:
        if next(count) == n:
            for staged in Path(out).rglob(f".*.{os.getpid()}") if n % 2 else ():
                os.truncate(staged, staged.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    on_operations(out, operation)


def sweep(tally: Tally, scratch: Path, kills: int, rng: random.Random) -> None:
    """A sweep of four runs killed over and over; the same command goes on, to the same runs and the same table."""
    folder = scratch / "sweep"
    folder.mkdir()
    log = folder / "log"
    words = ["sweep", *SMALL, *ALWAYS, "algorithm=fedavg,feddc", "zeta=0,0.15", "rounds=12", "--out"]
    outs = folder / "whole", folder / "killed"
    problem = complete([*words, str(outs[0])], log)
    done = 0
    for _ in range(kills):
        process = start([*words, str(outs[1])], log)
        moment, pause = _all_rounds(outs[1]) + rng.randint(1, 4), rng.uniform(0, 0.08)
        wait_until(process, lambda moment=moment: _all_rounds(outs[1]) >= moment)  # type: ignore[misc]
        time.sleep(pause)
        done += end(process, signal.SIGKILL) == -signal.SIGKILL
    problem = problem or complete([*words, str(outs[1])], log) or different_sweeps(*outs)
    what = "kill -9 of a sweep: the same runs, the same table"
    tally.count(what, 0 if problem else done, done, [problem] if problem else [])
    page, again = (report(out, folder / f"page-{out.name}") for out in outs)
    problem = None if page == again else f"differ: {', '.join(name for name in page if page[name] != again.get(name))}"
    tally.check("the report of a killed sweep: page, pictures and tables have the same sha256", problem)
    asked = folder / "asked"
    code = finish(start([*words, str(asked)], log, ask_at, "round-000003", signal.SIGTERM, str(asked)))
    line = tail(log)
    problem = None if code == 143 and "; go on with the same command" in line else f"exit {code}: {line}"
    problem = problem or complete([*words, str(asked)], log) or different_sweeps(outs[0], asked)
    tally.check("SIGTERM of a sweep: saves, exits 143, says how to go on", problem)


def different_sweeps(whole: Path, other: Path) -> str | None:
    """None if all runs and the table are the same."""
    for cell in sorted(whole.glob("*/")):
        if problem := different(other / cell.name, fingerprint(cell)):
            return problem
    return None if (whole / "table.md").read_bytes() == (other / "table.md").read_bytes() else "the tables differ"


def report(sweep: Path, folder: Path) -> dict[str, str]:
    """The sha256 of every file that `fedman report` makes of a sweep; what time its runs took is left out."""
    runs, page = folder / "runs", folder / "report.html"
    shutil.copytree(sweep, runs)
    for path in (*runs.rglob("summary.json"), *runs.rglob("rounds.jsonl")):
        path.write_text(re.sub(r'"seconds": [\d.e-]+', '"seconds": 1.0', path.read_text()))
        path.write_text(re.sub(r', "sum": "\w+"}', "}", path.read_text()))
    for path in runs.rglob("manifest.json"):
        path.unlink()  # as an earlier version would have left it: the changed files are read unchecked
    if problem := complete(["report", str(runs), "--out", str(page)], folder / "log"):
        raise RuntimeError(problem)
    made = (page, *folder.rglob("report_files/*/*"))
    return {path.name: sha256(path.read_bytes()) for path in made}


def _all_rounds(out: Path) -> int:
    return sum(rounds_done(cell) for cell in out.glob("*/"))
