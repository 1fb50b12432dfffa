"""Neighbours and fedman on the same workload, on the same machine, in turns.

    python compare.py WORKLOAD CHECKOUT DATA [--rounds 3] [--turns 2] [--keys precision=tf32 ...]

WORKLOAD is one of workloads.py, CHECKOUT the neighbour's repository, DATA where `fedman data` keeps data sets. Of each
turn the first round, which loads and compiles, does not count; the seconds are the median over all others. Memory is
the largest resident size of the process and its children, and on a GPU the largest that nvidia-smi saw.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from lines import MARK
from workloads import WORKLOADS

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Played:
    """One process: its rounds, and the memory that it needed, in GB."""

    seconds: list[float]
    accuracy: float
    memory: float
    gpu_memory: float


def play(*words: str) -> Played:
    """Run a program of this folder to its end."""
    process = subprocess.Popen(
        [sys.executable, *words], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    peak, ended = [0.0, 0.0], threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, peak, ended))
    watcher.start()
    assert process.stdout
    output = process.stdout.read()
    code = process.wait()
    ended.set()
    watcher.join()
    rounds = [json.loads(line.split(MARK)[1]) for line in output.splitlines() if MARK in line]
    if code or not rounds:
        sys.exit(f"{' '.join(words)} exited with {code}:\n{output[-3000:]}")
    accuracies = [r["accuracy"] for r in rounds if r["accuracy"] is not None]
    return Played([r["seconds"] for r in rounds], accuracies[-1], *peak)


def _watch(pid: int, peak: list[float], ended: threading.Event) -> None:
    while not ended.wait(0.5):
        peak[0] = max(peak[0], sum(map(_resident, _family(pid))) / 1e9)
        if shutil.which("nvidia-smi"):
            asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            used = subprocess.run(asked, capture_output=True, text=True).stdout.split()
            peak[1] = max(peak[1], float(used[0]) / 1e3 if used else 0.0)


def _family(pid: int) -> list[int]:
    """A process and all its children."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("checkout")
    parser.add_argument("data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--keys", nargs="*", default=[], help="of fedman.run, as precision=tf32")
    given = parser.parse_args()
    workload, common = WORKLOADS[given.workload], (given.checkout, given.data, str(given.rounds))
    common = (*(str(Path(p).resolve()) for p in common[:2]), common[2])
    programs = {"neighbour": (workload.launcher, *common, *workload.options),
                "fedman": ("ours.py", given.workload, *common, *given.keys)}  # fmt: skip
    played: dict[str, list[Played]] = {name: [] for name in programs}
    for _ in range(given.turns):
        for name, words in programs.items():
            started = time.perf_counter()
            played[name].append(play(*words))
            last = played[name][-1]
            print(
                f"# {name}: {last.seconds} s, {last.accuracy:.2f} %, {time.perf_counter() - started:.0f} s in all",
                flush=True,
            )
    medians = {
        name: statistics.median(s for p in turns for s in p.seconds[1:] or p.seconds) for name, turns in played.items()
    }
    print(f"| {workload.title} | s a round | accuracy after {given.rounds} rounds, % | memory, GB | GPU memory, GB |")
    print("| --- | --- | --- | --- | --- |")
    for name, turns in played.items():
        accuracy = statistics.fmean(p.accuracy for p in turns)
        memory, gpu = (max(values) for values in zip(*((p.memory, p.gpu_memory) for p in turns), strict=True))
        print(f"| {name} | {medians[name]:.3g} | {accuracy:.2f} | {memory:.1f} | {f'{gpu:.1f}' if gpu else '–'} |")
    print(f"ratio {medians['neighbour'] / medians['fedman']:.2f}")


if __name__ == "__main__":
    main()
