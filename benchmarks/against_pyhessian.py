"""fedman.flatness against PyHessian 0.1: the same model, data, batches and precision; products, seconds and errors.

    pip install --no-deps --target build/pyhessian PyHessian==0.1
    PYTHONPATH=build/pyhessian python benchmarks/against_pyhessian.py [--seeds 3] [--rounds 20] [--out FILE.json]

A small CNN trained by FedAvg on the embedded digits, all 1,437 training images in batches of 500, fp32, one thread of a
CPU. Errors are against Lanczos in float64 with residuals below 1e-9. PyHessian runs as it comes (tol=1e-3, at most 100
iterations a value or probe), and for the first value once more with a tighter tolerance; seconds are CPU time, the two
taking turns, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from pyhessian import hessian as PyHessian
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fedman
from fedman.data import load
from fedman.data.augment import channels_first, normalise
from fedman.flatness import Hessian, eigenpairs, hutchpp
from fedman.models import build

BATCH = 500


@dataclass
class Line:
    """One task done once."""

    task: str
    tool: str
    products: int
    seconds: float
    result: float  # the last eigenvalue, or the trace
    error: float  # the largest relative error of an eigenvalue, or the trace's standard error as a share of it


def subject(rounds: int) -> tuple[nn.Module, Tensor, Tensor]:
    data = load("digits")
    result = fedman.run(dataset="digits", model="small_cnn", clients=20, rounds=rounds, participation=0.5, device="cpu")
    model = build("small_cnn", data.shape, data.classes)
    model.load_state_dict(result.models["all"])
    x = channels_first(normalise(torch.as_tensor(data.x_train), data.mean, data.std, torch.float32)).contiguous()
    return model, x, torch.as_tensor(data.y_train)


class Theirs:
    """PyHessian with its products counted."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.inner = PyHessian(model, F.cross_entropy, dataloader=DataLoader(TensorDataset(x, y), BATCH), cuda=False)
        self.products = 0
        product = self.inner.dataloader_hv_product

        def counted(v: list[Tensor]) -> tuple[float, list[Tensor]]:
            self.products += 1
            return product(v)

        self.inner.dataloader_hv_product = counted


def relative(values: list[float], truth: Tensor) -> float:
    """The largest relative error; the values are sorted first, as deflation may find them out of order."""
    found = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    return float(((found - truth[: len(found)]) / truth[: len(found)]).abs().max())


def timed(task: Callable[[], tuple[int, float, float]], name: str, tool: str) -> Line:
    start = time.process_time()
    products, result, error = task()
    line = Line(name, tool, products, time.process_time() - start, result, error)
    print(
        f"{name:8} {tool:20} {products:6} products {line.seconds:8.2f} s  {result:.4f}  error {error:.2e}", flush=True
    )
    return line


def compare(model: nn.Module, x: Tensor, y: Tensor, truth: Tensor, seed: int) -> list[Line]:
    lines: list[Line] = []

    def their_top(k: int, tol: float = 1e-3) -> tuple[int, float, float]:
        torch.manual_seed(seed)
        tool = Theirs(model, x, y)
        values = tool.inner.eigenvalues(top_n=k, tol=tol, maxIter=100 if tol == 1e-3 else 1000)[0]
        return tool.products, min(values), relative(values, truth)

    def our_top(k: int) -> tuple[int, float, float]:
        found = eigenpairs(Hessian(model, F.cross_entropy, (x, y), batch_size=BATCH), k, seed=seed)
        return found.products, float(found.values[-1]), relative(found.values.tolist(), truth)

    def their_trace() -> tuple[int, float, float]:
        torch.manual_seed(seed)
        tool = Theirs(model, x, y)
        samples = tool.inner.trace()
        value = statistics.mean(samples)
        return tool.products, value, statistics.stdev(samples) / math.sqrt(len(samples)) / value

    def our_trace(rtol: float) -> tuple[int, float, float]:
        hessian = Hessian(model, F.cross_entropy, (x, y), batch_size=BATCH)
        top = eigenpairs(hessian, seed=seed)  # paid for here, though usually wanted anyway
        found = hutchpp(hessian, sketch=top.lanczos, rtol=rtol, seed=seed + 1)
        return hessian.products, found.value, found.error / found.value

    for k in (1, 20):
        lines.append(timed(lambda k=k: their_top(k), f"top-{k}", "PyHessian"))
        lines.append(timed(lambda k=k: our_top(k), f"top-{k}", "fedman"))
        if k == 1:  # the same with the accuracy of ours
            lines.append(timed(lambda: their_top(1, 1e-8), "top-1", "PyHessian, tol=1e-8"))
    lines.append(timed(their_trace, "trace", "PyHessian"))
    lines.append(timed(lambda: our_trace(lines[-1].error), "trace", "fedman"))
    lines.append(timed(lambda: our_trace(0.01), "trace 1%", "fedman"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph")
    torch.set_num_threads(1)
    model, x, y = subject(options.rounds)
    exact = Hessian(model, F.cross_entropy, (x, y), dtype=torch.float64, batch_size=BATCH)
    truth = eigenpairs(exact, 20, tol=1e-9, max_steps=400)
    print(f"{exact.size} parameters, {len(y)} images; λ_1 {truth.values[0]:.6f}, λ_20 {truth.values[-1]:.6f}, ", end="")
    print(f"largest residual {truth.residuals.max():.1e}", flush=True)
    lines = [line for seed in range(options.seeds) for line in compare(model, x, y, truth.values, seed)]

    print(f"\nmean of {options.seeds} seeds")
    for task in dict.fromkeys(line.task for line in lines):
        for tool in ("PyHessian", "PyHessian, tol=1e-8", "fedman"):
            mine = [line for line in lines if (line.task, line.tool) == (task, tool)]
            if mine:
                products, seconds, error, result = (
                    statistics.mean(getattr(line, key) for line in mine)
                    for key in ("products", "seconds", "error", "result")
                )
                print(f"| {task} | {tool} | {products:.0f} | {seconds:.2f} | {result:.4g} | {error:.1e} |")
    if options.out:
        options.out.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")


if __name__ == "__main__":
    main()
