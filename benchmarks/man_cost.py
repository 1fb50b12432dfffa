"""The cost of the MAN term: a training step of the paper's CIFAR-100 CNN without it, with it, with the straightforward
`a.square().mean()`, and a step of SAM; interleaved in one run, so that the ratios are valid on a busy machine.

    python benchmarks/man_cost.py [--device cpu|cuda] [--threads 1 2] [--steps 30] [--batch 50] [--out cost.json]

On cuda also in a CUDA graph: launched one by one from Python, the kernels of such a small model leave the GPU idle
most of the time, and the first table shows the cost of Python, not of the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedman.models import build
from fedman.penalties.man import ActivationNorm

ZETA, RHO = 0.15, 0.05
KINDS = ("plain", "MAN", "naive", "SAM")
Step = Callable[[], object]


def naive_man(model: nn.Module) -> Callable[[], Tensor]:
    """The term without `ActivationNorm`: keep the activations, square, average, add."""
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
    """Forward, backward and SGD update of the CNN on one fixed batch; `kind` is one of KINDS."""
    torch.manual_seed(0)
    model = build("cifar_cnn", (3, 32, 32), 100).to(device, memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(100, (batch,), device=device)
    man = {"MAN": ActivationNorm, "naive": naive_man}.get(kind, lambda _: None)(model)
    weights = list(model.parameters())
    sgd = torch.optim.SGD(weights, lr=0.01, weight_decay=1e-3)

    def gradient() -> None:
        loss = F.cross_entropy(model(images), labels)
        if man is not None:
            loss = loss + ZETA * man()
        sgd.zero_grad()
        loss.backward()

    def step() -> None:
        gradient()
        if kind == "SAM":
            slope = [w.grad for w in weights]
            scale = RHO / (torch.stack(torch._foreach_norm(slope)).norm() + 1e-16)
            ascent = torch._foreach_mul(slope, scale)
            with torch.no_grad():
                torch._foreach_add_(weights, ascent)
            gradient()
            with torch.no_grad():
                torch._foreach_sub_(weights, ascent)
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


def compare(title: str, steps: dict[str, Step], device: str, rounds: int) -> list[dict[str, object]]:
    """Median milliseconds, and the median ratio to the plain step timed in the same round, printed and returned."""
    repeat = 20 if device == "cuda" else 1
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for warm in [True] * 3 + [False] * rounds:
        for kind, step in steps.items():
            elapsed = seconds(step, device, repeat)
            if not warm:
                times[kind].append(elapsed)
    print(title)
    found: list[dict[str, object]] = []
    for kind, ours in times.items():
        ms, ratio = statistics.median(ours) * 1e3, statistics.median(map(float.__truediv__, ours, times["plain"]))
        print(f"  {kind:<6}{ms:9.3f} ms{(ratio - 1) * 100:+8.1f} %")
        found.append({"where": title, "model": "cifar_cnn", "kind": kind, "ms": round(ms, 4), "ratio": round(ratio, 4)})
    return found


def save(path: Path, found: list[dict[str, object]]) -> None:
    """Add these times to a file for `fedman report`, replacing earlier ones of the same machine and setting."""
    before = json.loads(path.read_text())["steps"] if path.exists() else []
    places = {entry["where"] for entry in found}
    steps = [*(entry for entry in before if entry["where"] not in places), *found]
    path.write_text(json.dumps({"steps": steps}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="CPU threads, one table each")
    parser.add_argument("--steps", type=int, default=30, help="timed rounds of the interleaved steps")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--out", type=Path, help="also add the times to this file, for fedman report")
    options = parser.parse_args()

    device = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    where = f"{device}, batch {options.batch}"
    found = []
    if options.device == "cpu":
        for threads in options.threads:
            torch.set_num_threads(threads)
            steps = {kind: training_step(kind, options.batch, "cpu") for kind in KINDS}
            found += compare(f"{where}, {threads} thread{'s' if threads > 1 else ''}", steps, "cpu", options.steps)
    else:
        steps = {kind: training_step(kind, options.batch, "cuda") for kind in KINDS}
        found += compare(f"{where}, eager", steps, "cuda", options.steps)
        graphs = {kind: captured(training_step(kind, options.batch, "cuda")) for kind in KINDS}
        found += compare(f"{where}, CUDA graph", graphs, "cuda", options.steps)
    if options.out:
        save(options.out, found)


if __name__ == "__main__":
    main()
