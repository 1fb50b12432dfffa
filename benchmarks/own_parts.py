"""What a user's own parts and the text task cost, interleaved in one run, as ratios.

    python benchmarks/own_parts.py [--device cpu|cuda] [--repeats 5]

- own algorithm: FedDC written outside the package against the built-in one, on the paper's CNN, seconds a round;
- text: a round of `--preset shakespeare` (LSTM) against a plain PyTorch loop over the same clients, on all cores and on
  one: same model, loss, clip and number of steps, in fp32.
"""

import argparse
import copy
import statistics
import time
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from fedman.algorithms import ALGORITHMS
from fedman.algorithms.feddc import FedDC
from fedman.config import resolve
from fedman.data import load
from fedman.execution.device import matmul_precision, pick_device
from fedman.paper.presets import find_preset
from fedman.runs.build import build
from fedman.training.aggregate import collect
from fedman.training.federation import Assignment
from fedman.training.round import Round
from rounds import Rounds


@dataclass(frozen=True)
class OwnFedDC(FedDC):
    """FedDC from outside the package."""

    title = "own FedDC"


def seconds(device: str, call) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interleaved(device: str, repeats: int, calls: dict) -> dict[str, float]:
    """The median seconds of each call after one to warm up."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(device, call))
    return {name: statistics.median(v) for name, v in times.items()}


def own_algorithm(device: str, repeats: int) -> None:
    clients = 10 if device == "cuda" else 2
    runs = {name: Rounds(20, name, device, "auto") for name in ("feddc", ALGORITHMS.name_of(OwnFedDC()))}
    found = interleaved(device, repeats, {n: lambda r=r: r.play(list(range(clients))) for n, r in runs.items()})
    (_, built_in), (_, own) = found.items()
    print(f"own algorithm: {own:.4f} s a round, built-in {built_in:.4f}: {own / built_in:.3f} times")


def plain_loop(model, parts, x, y, batch: int, lr: float, clip: float) -> None:
    for part in parts:
        mine = copy.deepcopy(model)
        optimiser = torch.optim.SGD(mine.parameters(), lr)
        order = part[torch.randperm(len(part))]
        for rows in order.split(batch):
            optimiser.zero_grad()
            loss = cross_entropy(mine(x[rows]).flatten(0, 1), y[rows].flatten(), ignore_index=-1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(mine.parameters(), clip)
            optimiser.step()


def text(device: str, repeats: int, precision: str) -> None:
    config = resolve({"precision": precision}, find_preset("shakespeare"))
    built = build([config], load(*config.source), device)
    (federation,) = built.federations
    state, samples = federation.start(), federation.samples
    cohort = list(range(0, 99, 12))
    model = copy.deepcopy(built.executor.execution.model).to(device)

    def ours():
        now = [Assignment(federation, state, Round(state.round, cohort, config.lr))]
        list(collect(now, built.in_process.train(now, [])))

    def theirs():
        plain_loop(
            model, [samples.parts[k] for k in cohort], samples.x, samples.y, config.batch_size, config.lr, config.clip
        )

    def on_one_core():
        cores = torch.get_num_threads()
        torch.set_num_threads(1)
        theirs()
        torch.set_num_threads(cores)

    calls = {"fedman": ours, "all cores": theirs} | ({"one core": on_one_core} if device == "cpu" else {})
    with matmul_precision(built.precision):
        found = interleaved(device, repeats, calls)
    ratios = ", ".join(f"{v / found['fedman']:.2f} times ({n})" for n, v in found.items() if n != "fedman")
    how = type(built.executor.execution).__name__
    print(f"text, {built.precision}, {how}: {found['fedman']:.3f} s a round; a plain loop in fp32 takes {ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    device = pick_device(given.device)
    own_algorithm(device, given.repeats)
    for precision in ("fp32", "bf16"):
        text(device, given.repeats, precision)


if __name__ == "__main__":
    main()
