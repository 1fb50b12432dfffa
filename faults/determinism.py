"""Determinism: the same seed gives the same bits, on one core or two; other chunks give the same up to rounding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import fedman
from faults.tally import Tally
from fedman.algorithms import ALGORITHMS
from fedman.runs.result import Result

KEYS: dict[str, Any] = {
    "model": "small_cnn", "clients": 10, "participation": 0.4, "rounds": 4, "epochs": 1, "batch_size": 20,
    "augment": True, "unbalanced": 0.5, "zeta": 0.15,
}  # fmt: skip
CHUNKS = 1e-4  # of the weights' norm, float32, after four rounds
CHUNKS64 = 1e-12  # the same in float64
CHUNKS16 = 2e-2  # the same in bf16, whose numbers have three digits
CUDA = 1e-3  # the same on a CPU and a GPU, whose sums have other orders


def run(tally: Tally, scratch: Path, small: bool = False) -> None:
    """Per algorithm: twice, one thread and two, one client at a time and all at once; on CUDA where there is one."""
    algorithms = ["feddc"] if small else list(ALGORITHMS)
    worst: dict[str, float] = {}

    def compare(what: str, algorithm: str, bound: float, a: Result, b: Result) -> None:
        distance = apart(a, b)
        problem = f"{algorithm}: {distance:.1e} apart, {bound:g} allowed" if distance > bound else None
        if not problem and bound == 0 and records(a) != records(b):
            problem = f"{algorithm}: the records differ"
        tally.check(what, problem)
        worst[what] = max(worst.get(what, 0.0), distance)
        tally.note(what, "bit for bit" if bound == 0 else f"largest {worst[what]:.1e} of {bound:g}")

    for algorithm in algorithms:
        first, apiece = play(algorithm), play(algorithm, chunk=1)
        compare("the same seed twice, CPU", algorithm, 0, first, play(algorithm))
        compare("one thread and two, CPU", algorithm, 0, apiece, play(algorithm, chunk=1, threads=2))
        compare("a chunk of one and of all, float32", algorithm, CHUNKS, first, apiece)
        whole, single = play(algorithm, precision="fp64"), play(algorithm, precision="fp64", chunk=1)
        compare("a chunk of one and of all, float64", algorithm, CHUNKS64, whole, single)
        if not small:
            halves = [play(algorithm, precision="bf16", chunk=chunk) for chunk in (100, 1)]
            compare("a chunk of one and of all, bf16", algorithm, CHUNKS16, *halves)
        what = "the same seed twice, CUDA"
        if torch.cuda.is_available():
            compare(what, algorithm, 0, play(algorithm, device="cuda"), play(algorithm, device="cuda"))
            compare("CPU and CUDA, float32", algorithm, CUDA, first, play(algorithm, device="cuda", precision="fp32"))
        else:
            tally.note(what, "not tried: no GPU here")


def play(algorithm: str, threads: int = 1, device: str = "cpu", chunk: int = 100, **keys: Any) -> Result:
    """A few rounds on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return fedman.run(**KEYS, algorithm=algorithm, chunk=chunk, device=device, **keys)
    finally:
        torch.set_num_threads(before)


def apart(a: Result, b: Result) -> float:
    """‖a − b‖ / ‖a‖ over all weights of the three models; infinite if anything is not finite."""
    pairs = [(a.models[m][k].double(), b.models[m][k].double()) for m in a.models for k in a.models[m]]
    distance = math.sqrt(sum((x - y).square().sum().item() for x, y in pairs))
    norm = math.sqrt(sum(x.square().sum().item() for x, _ in pairs))
    return distance / norm if math.isfinite(distance) and norm > 0 else math.inf


def records(result: Result) -> list[dict[str, Any]]:
    """What is recorded, but for the time it took."""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in result.rounds]
