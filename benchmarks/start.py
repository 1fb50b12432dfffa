"""From Enter to the end of `fedman run`, phase by phase: with an empty cache of compiled kernels, then with a full one.

    python benchmarks/start.py [--repeats 2] [--json start.json] [ARGUMENT...]

ARGUMENTs are those of `fedman run`, by default `--preset cifar100-dir0.3`. Every run is a process of its own. Phases:

    keys     the interpreter, the command line, the check of the keys
    data     reading the data set; torch is imported and the GPU opened meanwhile
    torch    what is left of that
    build    partition, model, samples on the device
    kernels  compiling or loading the GPU kernels, side by side
    graph    capturing the largest round
    first    the first round, up to its record
    rounds   all others, and what a run writes in the end
    exit     up to the end of the process
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

PHASES = ("keys", "data", "torch", "build", "kernels", "graph", "first", "rounds", "exit")


def play(arguments: list[str], cache: Path, out: Path) -> dict[str, float]:
    """Seconds of every phase of one run."""
    marks = out.with_suffix(".marks")
    caches = {"TRITON_CACHE_DIR": str(cache / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    command = [sys.executable, __file__, "--marks", str(marks), *arguments, "--out", str(out)]
    start = time.time()
    subprocess.run(command, env=os.environ | caches, check=True, stdout=subprocess.DEVNULL)
    end = time.time()
    seen = dict(line.split() for line in marks.read_text().splitlines())
    times = [start, *(float(seen[phase]) for phase in PHASES[:-1]), end]
    return dict(zip(PHASES, (b - a for a, b in pairwise(times)), strict=True)) | {"all": end - start}


def observed(marks: Path, arguments: list[str]) -> None:
    """`fedman run`, with the time at the end of each phase written to a file."""
    from fedman import data
    from fedman.cli import main

    said: set[str] = set()

    def mark(phase: str) -> None:
        if phase not in said:
            with marks.open("a") as file:
                file.write(f"{phase} {time.time()}\n")
        said.add(phase)

    def ends(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            mark(phase)
            return value

        return wrapped

    load = data.load

    def observed_load(*args: Any) -> Any:
        mark("keys")
        value = load(*args)
        mark("data")
        from fedman.backends.in_process import InProcess
        from fedman.runs import build, experiment

        mark("torch")
        experiment.build = ends("build", experiment.build)
        build.Built.rehearse = ends("kernels", build.Built.rehearse)  # type: ignore[method-assign]
        InProcess.prepare = ends("graph", InProcess.prepare)  # type: ignore[method-assign]
        experiment.Run._tell = ends("first", experiment.Run._tell)  # type: ignore[method-assign]
        experiment.play = ends("rounds", experiment.play)
        return value

    data.load = observed_load
    sys.argv = ["fedman", "run", *arguments]
    main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=2, help="runs with the full cache")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--marks", type=Path, help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.marks:
        observed(options.marks, arguments)
        return
    arguments = arguments or ["--preset", "cifar100-dir0.3"]
    rows = []
    print(f"{'cache':8}" + "".join(f"{phase:>9}" for phase in (*PHASES, "all")), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(options.repeats + 1):
            found = play(arguments, Path(folder) / "cache", Path(folder) / f"run{i}")
            rows.append({"cache": "full" if i else "empty"} | found)
            print(f"{rows[-1]['cache']:8}" + "".join(f"{found[phase]:9.2f}" for phase in found), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
