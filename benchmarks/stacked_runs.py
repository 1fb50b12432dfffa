"""Where the time of stacked runs goes: the host's work by function, the GPU's steps and evaluations, its gaps.

    python benchmarks/stacked_runs.py --dataset cifar100 --algorithm fedavg --runs 9 [--kernels 20]

The paper's setting on random images, ten clients of each run in every round, so that one graph serves all rounds.
Nothing waits for the device that does not in a sweep, but for the last rounds, which run under PyTorch's profiler.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from fedman.backends.in_process import InProcess
from fedman.config import Config, resolve
from fedman.data import Dataset
from fedman.data.catalog import lookup
from fedman.execution import cuda_graphs as graphs
from fedman.execution.transfer import Fetched
from fedman.paper.presets import PRESETS, ZETA
from fedman.runs import experiment
from fedman.training import aggregate

SHAPES = {"cifar100": (50_000, 32), "tiny-imagenet": (100_000, 64)}
WARM, TIMED, PROFILED = 4, 8, 4  # rounds


def random_images(name: str) -> Dataset:
    """A data set of the real one's shape."""
    (n, side), spec, rng = SHAPES[name], lookup(name), np.random.default_rng(0)
    x = rng.integers(0, 256, (n + 10_000, side, side, 3), dtype=np.uint8)
    y = np.arange(len(x)) % spec.classes
    return Dataset(name, x[:n], y[:n], x[n:], y[n:], spec.classes, spec.mean, spec.std, augment=True, iid=spec.iid)


def settings(dataset: str, algorithm: str, runs: int, precision: str) -> list[Config]:
    """So many cells of the paper's table."""
    cells = [(p, z, s) for s in range(3) for p in ("dir0.3", "dir0.6", "iid") for z in (0, ZETA[dataset])]
    shared = {"algorithm": algorithm, "precision": precision, "cohort": "fixed", "rounds": WARM + TIMED + PROFILED + 1}
    return [resolve({**shared, "zeta": z, "seed": s}, PRESETS[f"{dataset}-{p}"]) for p, z, s in cells[:runs]]


class Clock:
    """Seconds of the host inside functions, and of the GPU inside replays, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.host: Counter[str] = Counter()
        self.replays: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def watch(self, owner: Any, name: str, label: str) -> None:
        """Count the time of every call of `owner.name`."""
        call = getattr(owner, name)

        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.host[label] += (time.perf_counter() - start) * self.on

        setattr(owner, name, timed)

    def watch_replays(self) -> None:
        """Put events around the replays of graphs."""
        replay: Callable[..., Any] = graphs._Captured.replay

        def timed(captured: Any, steps: graphs.Steps) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            carry = replay(captured, steps)
            end.record()
            if self.on:
                self.replays.append(("steps" if steps.count > 1 else "evaluations", start, end))
            return carry

        graphs._Captured.replay = timed  # type: ignore[method-assign]

    def gpu(self) -> Counter[str]:
        """Seconds by kind of replay."""
        spent: Counter[str] = Counter()
        for kind, start, end in self.replays:
            spent[kind] += start.elapsed_time(end) / 1000
        return spent


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar100", choices=SHAPES)
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--runs", type=int, default=9, help="stacked together, at most 18")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--kernels", type=int, default=20, help="how many of the longest kernels to list")
    args = parser.parse_args()

    clock, profiler, marks = Clock(), profile(activities=[ProfilerActivity.CUDA], acc_events=True), [0.0] * 4
    for owner, name, label in (
        (InProcess, "_train", "launch a round"), (InProcess, "_draw", "draw for the next one"),
        (experiment.Run, "record", "write the records of the last one"), (InProcess, "_collect", "queue the uploads"),
        (Fetched, "values", "wait for the GPU"), (aggregate, "aggregate", "close the round"),
        (experiment.Run, "evaluate", "queue the evaluations"),
    ):  # fmt: skip
        clock.watch(owner, name, label)
    clock.watch_replays()

    def follow(record: dict[str, Any]) -> None:
        done = record["round"] - WARM
        if done == 0:
            clock.on, marks[0] = True, time.perf_counter()
        elif done == TIMED:
            clock.on, marks[1] = False, time.perf_counter()
            torch.cuda.synchronize()
            profiler.start()
            marks[2] = time.perf_counter()
        elif done == TIMED + PROFILED:
            torch.cuda.synchronize()
            marks[3] = time.perf_counter()
            profiler.stop()

    configs = settings(args.dataset, args.algorithm, args.runs, args.precision)
    silent = [lambda record: None] * (len(configs) - 1)
    experiment.run_stacked(
        configs, random_images(args.dataset), [None] * len(configs), False, "cuda", [*silent, follow], print
    )

    def line(label: str, seconds: float, rounds: int = TIMED) -> None:
        print(f"{label:36s} {1000 * seconds / rounds:9.2f} ms a round")

    print(f"{torch.cuda.get_device_name()}, {args.dataset}, {args.algorithm}, {len(configs)} runs stacked")
    line("a round", marks[1] - marks[0])
    for kind, seconds in clock.gpu().items():
        line(f"GPU: {kind}", seconds)
    for label, seconds in clock.host.most_common():
        line(f"host: {label}", seconds)
    kernels = [e for e in profiler.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    print(f"GPU memory: {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB reserved")
    line("profiled: a round", marks[3] - marks[2], PROFILED)
    line("profiled: some kernel runs", busy((e.time_range.start, e.time_range.end) for e in kernels) / 1e6, PROFILED)
    spent: Counter[str] = Counter()
    for e in kernels:
        spent[e.name] += e.time_range.end - e.time_range.start
    for name, microseconds in spent.most_common(args.kernels):
        line(f"  {name[:34]}", microseconds / 1e6, PROFILED)


if __name__ == "__main__":
    main()
