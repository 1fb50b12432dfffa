"""One client's gradient on one CPU thread in fp32 and in bf16, model by model: where bf16 pays.

    python benchmarks/cpu_precision.py [--repeats 7]

Batches of 50 random samples (ResNet: 20), ζ = 0.15, the two taking turns; medians.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from fedman.execution.base import Batch
from fedman.execution.one_by_one import OneByOne
from fedman.models.convnet import cifar_cnn, small_cnn, tiny_cnn
from fedman.models.mlp import MLP
from fedman.models.parameters import flatten
from fedman.models.resnet import ResNet18
from fedman.penalties import MAN
from fedman.tasks import Classification

MODELS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    "MLP 64-64-32": (MLP((64,), 10), (64,), 50),
    "small CNN, 8×8": (small_cnn((1, 8, 8), 10), (1, 8, 8), 50),
    "small CNN, 28×28": (small_cnn((1, 28, 28), 10), (1, 28, 28), 50),
    "CIFAR CNN": (cifar_cnn((3, 32, 32), 100), (3, 32, 32), 50),
    "MLP 3072-512-256": (MLP((3072,), 10, (512, 256)), (3072,), 50),
    "Tiny-ImageNet CNN": (tiny_cnn((3, 64, 64), 200), (3, 64, 64), 50),
    "ResNet-18": (ResNet18((3, 32, 32), 10), (3, 32, 32), 20),
}


def seconds(model: OneByOne, W: Tensor, x: Tensor, y: Tensor) -> float:
    start = time.perf_counter()
    model.gradient(W, Batch(x, y), 0.15)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print("| model | parameters | fp32, ms | bf16, ms | bf16 is |\n| --- | --- | --- | --- | --- |")
    for name, (model, shape, batch) in MODELS.items():
        ways = {precision: OneByOne(model, Classification(), MAN(), precision) for precision in ("fp32", "bf16")}
        W, x, y = flatten(model)[None], torch.randn(1, batch, *shape), torch.randint(10, (1, batch))
        times: dict[str, list[float]] = {precision: [] for precision in ways}
        for _ in range(repeats + 1):
            for precision, way in ways.items():
                times[precision].append(seconds(way, W, x, y))
        fp32, bf16 = (1000 * statistics.median(t[1:]) for t in times.values())
        print(f"| {name} | {W.shape[1]:,} | {fp32:.1f} | {bf16:.1f} | {fp32 / bf16:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
