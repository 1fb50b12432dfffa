"""What the MAN term costs: one training step of the paper's CIFAR-100 CNN without it, with it, and with the
obvious `a.square().mean()`; all three interleaved in one run, so that the ratios hold on a busy machine.

    python benchmarks/man_cost.py [--device cpu|cuda] [--threads 1 2] [--steps 30] [--batch 50]

On cuda also under a CUDA graph: launched one by one from Python, a model this small leaves the GPU idle most of
the time, and the first table shows the cost of Python, not of the arithmetic.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedman.man import ActivationNorm
from fedman.models import build

ZETA = 0.15
Step = Callable[[], object]


def naive_man(model: nn.Module) -> Callable[[], Tensor]:
    """The term as one would write it: keep the activations, square, average, add."""
    taps: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda _module, _args, out: taps.append(out))
    model.register_forward_hook(lambda _module, _args, out: taps.append(out))

    def term() -> Tensor:
        value = torch.stack([a.square().mean() for a in taps]).sum()
        taps.clear()
        return value

    return term


def training_step(kind: str, batch: int, device: str) -> Step:
    """Forward, backward and SGD update of the CNN on one fixed batch; `kind` is plain, MAN or naive."""
    torch.manual_seed(0)
    model = build("cifar_cnn", (3, 32, 32), 100).to(device, memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(100, (batch,), device=device)
    man = {"plain": lambda _: None, "MAN": ActivationNorm, "naive": naive_man}[kind](model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=1e-3)

    def step() -> None:
        loss = F.cross_entropy(model(images), labels)
        if man is not None:
            loss = loss + ZETA * man()
        sgd.zero_grad()
        loss.backward()
        sgd.step()

    return step


def captured(step: Step) -> Step:
    """The step as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds(step: Step, device: str, repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeat


def compare(title: str, steps: dict[str, Step], device: str, rounds: int) -> None:
    """Print median milliseconds, and the median ratio to the plain step timed in the same round."""
    repeat = 20 if device == "cuda" else 1
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for warm in [True] * 3 + [False] * rounds:
        for kind, step in steps.items():
            elapsed = seconds(step, device, repeat)
            if not warm:
                times[kind].append(elapsed)
    print(title)
    for kind, ours in times.items():
        ratio = statistics.median(a / b for a, b in zip(ours, times["plain"], strict=True))
        print(f"  {kind:<6}{statistics.median(ours) * 1e3:9.3f} ms{(ratio - 1) * 100:+8.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="CPU threads, one table each")
    parser.add_argument("--steps", type=int, default=30, help="timed rounds of the interleaved steps")
    parser.add_argument("--batch", type=int, default=50)
    options = parser.parse_args()

    kinds = ("plain", "MAN", "naive")
    if options.device == "cpu":
        for threads in options.threads:
            torch.set_num_threads(threads)
            steps = {kind: training_step(kind, options.batch, "cpu") for kind in kinds}
            compare(f"cpu, {threads} thread(s), batch {options.batch}", steps, "cpu", options.steps)
        return
    steps = {kind: training_step(kind, options.batch, "cuda") for kind in kinds}
    compare(f"cuda, eager, batch {options.batch}", steps, "cuda", options.steps)
    graphs = {kind: captured(training_step(kind, options.batch, "cuda")) for kind in kinds}
    compare(f"cuda, CUDA graph, batch {options.batch}", graphs, "cuda", options.steps)


if __name__ == "__main__":
    main()
