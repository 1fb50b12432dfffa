"""What a Hessian-vector product costs, ways to compute it compared, and what the measurements built on it cost.

    python benchmarks/flatness.py [--device cuda] [--run FOLDER [--data-dir DIR]] [--part products landscapes measures]
                                  [--measures 0 2] [--images 50000] [--seconds 90] [--batch-size 5000] [--keep-graphs]
                                  [--out FILE.json]

Without --run: products and landscapes alone, of the paper's CIFAR-100 CNN at its initial weights on random images. They
take the same time there, but the spectrum is another one. Every line is printed and written as soon as it is known; no
way of computing a product is begun after --seconds.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from fedman.data import load
from fedman.execution.device import device_name, matmul_precision, pick_device
from fedman.flatness import Hessian, landscape, random_direction
from fedman.models.convnet import cifar_cnn
from fedman.models.parameters import ParameterLayout
from fedman.paper.flatness.finished_runs import read_run, restore, select_samples, training_samples
from fedman.paper.flatness.measure import BATCH, Measurer, Request

Product = Callable[[Tensor], Tensor]  # rows [k, P] to rows [k, P]
Samples = tuple[tuple[Tensor, Tensor], list[Tensor]]  # inputs and labels, and which of them each client holds


@dataclass(frozen=True)
class Way:
    """One way to multiply: its name, how many vectors at once, and how to make it."""

    name: str
    vectors: int
    make: Callable[[nn.Module, Tensor, Tensor], Product]


def library(batch: int, **options: Any) -> Callable[[nn.Module, Tensor, Tensor], Product]:
    options = {"keep_graphs": False} | options
    return lambda model, x, y: Hessian(model, F.cross_entropy, (x, y), batch_size=batch, **options)


def channels_last(batch: int) -> Callable[[nn.Module, Tensor, Tensor], Product]:
    def make(model: nn.Module, x: Tensor, y: Tensor) -> Product:
        inner = copy.deepcopy(model).to(memory_format=torch.channels_last)
        return library(batch)(inner, x.contiguous(memory_format=torch.channels_last), y)

    return make


def forward_over_reverse(batch: int) -> Callable[[nn.Module, Tensor, Tensor], Product]:
    """d/dt ∇L(w + t v), all vectors in one vmap."""

    def make(model: nn.Module, x: Tensor, y: Tensor) -> Product:
        weights = {n: p.detach() for n, p in model.named_parameters()}
        layout = ParameterLayout.of(model)

        def product(rows: Tensor) -> Tensor:
            total = torch.zeros_like(rows)
            for xb, yb in zip(x.split(batch), y.split(batch), strict=True):
                gradient = grad(lambda w, xb=xb, yb=yb: F.cross_entropy(functional_call(model, w, (xb,)), yb))

                def single(row: Tensor, gradient: Any = gradient) -> Tensor:
                    return layout.flatten(jvp(gradient, (weights,), (layout.unflatten(row),))[1])

                part = single(rows[0])[None] if len(rows) == 1 else vmap(single)(rows)
                total += part * (len(yb) / len(y))
            return total

        return by_heuristics(product)

    return make


def double_backward(batch: int) -> Callable[[nn.Module, Tensor, Tensor], Product]:
    """Written out, several vectors by vmap."""

    def make(model: nn.Module, x: Tensor, y: Tensor) -> Product:
        weights = list(model.parameters())
        layout = ParameterLayout.of(model)

        def product(rows: Tensor) -> Tensor:
            total = torch.zeros_like(rows)
            for xb, yb in zip(x.split(batch), y.split(batch), strict=True):
                gradient = torch.autograd.grad(F.cross_entropy(model(xb), yb), weights, create_graph=True)
                shaped = list(layout.unflatten(rows).values())
                if len(rows) == 1:
                    parts = [t[None] for t in torch.autograd.grad(gradient, weights, [t[0] for t in shaped])]
                else:
                    parts = torch.autograd.grad(gradient, weights, shaped, is_grads_batched=True)
                total += torch.cat([t.flatten(1) for t in parts], 1) * (len(yb) / len(y))
            return total

        return by_heuristics(product)

    return make


def by_heuristics(product: Product) -> Product:
    """fp32, and cuDNN's own guess of the best algorithm."""

    def inner(rows: Tensor) -> Tensor:
        with matmul_precision("fp32"):
            return product(rows)

    return inner


def ways(batch: int) -> Iterator[Way]:
    small = max(1, batch // 5)
    for size in (small, batch // 2, batch, 2 * batch):
        yield Way(f"double backward, {size} images", 1, library(size))
    yield Way(f"double backward, {batch} images, 4 vectors", 4, library(batch))
    yield Way(f"double backward, {batch} images, 8 vectors", 8, library(batch))
    yield Way(f"double backward, {batch} images, graphs kept", 1, library(batch, keep_graphs=True))
    yield Way(f"double backward, {batch} images, channels_last", 1, channels_last(batch))
    yield Way(f"double backward, {batch} images, TF32", 1, library(batch, tf32=True))
    yield Way(f"double backward, {batch // 2} images, fp64", 1, library(batch // 2, dtype=torch.float64))
    yield Way(f"forward over reverse, {batch} images, cuDNN's guess", 1, forward_over_reverse(batch))
    yield Way(f"double backward, {batch} images, PyTorch's own convolutions, cuDNN's guess", 1, double_backward(batch))
    yield Way(f"double backward by vmap, {small} images, 4 vectors, cuDNN's guess", 4, double_backward(small))
    yield Way(f"forward over reverse, {small} images, 4 vectors, cuDNN's guess", 4, forward_over_reverse(small))


class Clock:
    """Seconds and memory on a device."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def fresh(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def gib(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**30 if self.cuda else float("nan")


def products(model: nn.Module, x: Tensor, y: Tensor, batch: int, budget: float, clock: Clock) -> Iterator[dict]:
    """Each way: a first product (kernels chosen, graphs built), then two timed ones, against the first way's result."""
    size = sum(p.numel() for p in model.parameters())
    rows = torch.randn(8, size, generator=torch.Generator().manual_seed(0)).to(x.device)
    begun, truth = clock.now(), None
    for way in ways(batch):
        if clock.now() - begun > budget:
            yield {"way": way.name, "skipped": f"after {budget:g} s"}
            continue
        clock.fresh()
        product = None
        try:
            product = way.make(model, x, y)
            times = [clock.now()]
            for _ in range(3):
                result = product(rows[: way.vectors])
                times.append(clock.now())
        except RuntimeError as error:  # out of memory, or an operation that has no such derivative
            yield {"way": way.name, "failed": str(error).splitlines()[0][:100]}
            continue
        finally:
            del product
        first, *rest = (b - a for a, b in pairwise(times))
        truth = result[0].double() if truth is None else truth
        yield {
            "way": way.name,
            "first_s": first,
            "ms_a_vector": 1e3 * statistics.mean(rest) / way.vectors,
            "gib": clock.gib(),
            "differs": float((result[0].double() - truth).norm() / truth.norm()),
        }


REQUESTS = {
    "top-1, then trace at 1 %": {"top": 1, "trace": True},
    "trace at 1 % alone": {"trace": True},
    "top-200": {"top": 200},
    "density, 5 starts of 100 steps": {"density": True},
    "layers: top-1 and trace each": {"layers": True},
    "clients: top-1 each": {"clients": True},
    "landscape, 41x41": {"landscape": "random"},
}
FIGURES = ("value", "error", "products", "seconds", "converged", "mean")


def measures(model: nn.Module, samples: Samples, names: list[str], options: argparse.Namespace) -> Iterator[dict]:
    for name in names:
        request = Request(**REQUESTS[name], batch_size=options.batch_size, keep_graphs=options.keep_graphs)
        for measurement, result in Measurer(model, *samples, request).run():
            figures = {key: result[key] for key in FIGURES if key in result}
            top = {"top": float(result["values"][0])} if "values" in result else {}
            yield {"request": name, "measurement": measurement} | top | figures


def landscapes(model: nn.Module, x: Tensor, y: Tensor, batch: int, clock: Clock) -> Iterator[dict]:
    """25 points of a landscape."""
    directions = [random_direction(model, seed) for seed in (0, 1)]
    times = [clock.now()]
    for _ in range(2):
        landscape(model, F.cross_entropy, (x, y), directions, points=5, batch_size=batch)
        times.append(clock.now())
    yield {"landscape": f"{batch} images at once", "s_41x41": (times[2] - times[1]) * 41**2 / 25}


def subject(options: argparse.Namespace, device: str) -> tuple[nn.Module, Samples]:
    if options.run is not None:
        run = read_run(options.run)
        data = load(run.config.dataset, options.data_dir or run.config.data_dir)
        selection = select_samples(run, data, None)
        samples = training_samples(data, selection, device, torch.float32)
        return restore(run, "all", data).to(device), (samples, selection.clients)
    torch.manual_seed(0)
    model = cifar_cnn((3, 32, 32), 100).to(device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(options.images, 3, 32, 32, generator=generator).to(device)
    y = torch.randint(100, (options.images,), generator=generator).to(device)
    return model, ((x, y), list(torch.arange(options.images).chunk(100)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--run", type=Path, help="a finished run's folder")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument(
        "--part", nargs="+", choices=["products", "landscapes", "measures"], help="[all; without --run not the last]"
    )
    parser.add_argument("--measures", nargs="+", type=int, default=range(len(REQUESTS)), help="which, by number from 0")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=90, help="for the products")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--keep-graphs", action=argparse.BooleanOptionalAction)
    parser.add_argument("--out", type=Path, help="write the figures here")
    options = parser.parse_args()

    wanted = options.part or ["products", "landscapes"] + (["measures"] if options.run else [])
    if "measures" in wanted and options.run is None:
        parser.error("measures need --run")
    device = pick_device(options.device)
    options.batch_size = options.batch_size or BATCH[device]
    start = time.perf_counter()
    model, samples = subject(options, device)
    x, y = samples[0]
    about = f"{device_name(torch.device(device))}, torch {torch.__version__}, {len(y)} images"
    print(f"{about}; ready after {time.perf_counter() - start:.1f} s", flush=True)
    parts: dict[str, Callable[[], Iterator[dict]]] = {
        "products": lambda: products(model, x, y, options.batch_size, options.seconds, Clock(device)),
        "landscapes": lambda: landscapes(model, x, y, options.batch_size, Clock(device)),
        "measures": lambda: measures(model, samples, [list(REQUESTS)[i] for i in options.measures], options),
    }
    lines: list[dict] = []
    for part in wanted:
        for line in parts[part]():
            lines.append(line)
            words = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items())
            print(f"{time.perf_counter() - start:6.1f} s", *words, sep="  ", flush=True)
            if options.out:
                options.out.write_text(json.dumps({"about": about, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
