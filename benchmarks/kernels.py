"""The stacked kernels on a GPU: right against float64, fast against the card's ceilings.

    python benchmarks/kernels.py                          # errors, time of each kernel, time of a whole SGD step
    python benchmarks/kernels.py --tune --json tune.json  # every kernel under several tile sizes

Times are medians of CUDA-graph replays (a kernel's inputs may then be in the cache, as they are in a real step).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedman.kernels import activation, conv, first_stage, gram, head, linear, update
from fedman.kernels.convnet import StackedConvNet
from fedman.models.convnet import ConvNet, cifar_cnn, tiny_cnn
from fedman.models.parameters import ParameterLayout
from fedman.penalties.man import ActivationNorm

DEVICE = torch.device("cuda")
MODELS: dict[str, tuple[Callable[..., ConvNet], tuple[int, int, int], int]] = {
    "cifar": (cifar_cnn, (3, 32, 32), 100),
    "tiny": (tiny_cnn, (3, 64, 64), 200),
}


@dataclass
class Case:
    """One kernel: how to call it, the operations and least bytes of a call, tile sizes to try and whose they are."""

    name: str
    call: Callable[[], object]
    flops: float
    bytes: float
    grid: list[dict[str, Any]] = field(default_factory=list)
    module: ModuleType = conv
    tiles: str = ""  # the module's table of tile sizes, or its function that chooses them

    def time(self, options: dict[str, Any] | None) -> float:
        """Median microseconds, with `options` in place of the kernel's own tile sizes."""
        if options is None:
            return graph_time(self.call)
        table = isinstance(getattr(self.module, self.tiles), dict)
        with mock.patch.object(self.module, self.tiles, options if table else lambda *_, **__: dict(options)):
            return graph_time(self.call)


def graph_time(call: Callable[[], object], calls: int = 20, replays: int = 7) -> float:
    """Median microseconds of `call` inside a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return sorted(times)[replays // 2]


def grid(**choices: Iterable[Any]) -> list[dict[str, Any]]:
    """All combinations of the given values."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def problem(name: str, clients: int, batch: int) -> tuple[ConvNet, tuple[int, int, int], Tensor, Tensor, Tensor]:
    """A model, its image shape, S rows of parameters near its initial ones, random images and labels."""
    build, shape, classes = MODELS[name]
    model = build(shape, classes).to(DEVICE)
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    W = start + 0.01 * torch.randn(clients, start.numel(), device=DEVICE)
    x = torch.randn(clients, batch, *shape[1:], shape[0], device=DEVICE)
    return model, shape, W, x, torch.randint(classes, (clients, batch), device=DEVICE)


def exact_losses(model: ConvNet, W: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy [S] and MAN terms [S, L] of the module itself, one client after the other."""
    layout, man, ce, terms = ParameterLayout.of(model), ActivationNorm(model), [], []
    for row, images, labels in zip(W, x, y, strict=True):
        logits = functional_call(model, layout.unflatten(row), (images.movedim(-1, 1),))
        ce.append(F.cross_entropy(logits, labels))
        terms.append(torch.stack(list(man.terms().values())))
    man.remove()
    return torch.stack(ce), torch.stack(terms)


def errors(name: str, precision: str) -> dict[str, Any]:
    """Relative errors of losses and gradient against the module in float64, and whether two runs agree to the bit."""
    model, shape, W, x, y = problem(name, 3, 50)
    zeta = torch.tensor([0.0, 0.15, 1.0], device=DEVICE)
    W64 = W.double().requires_grad_()
    ce64, man64 = exact_losses(model.double(), W64, x.double(), y)
    (grad64,) = torch.autograd.grad((ce64 + zeta * man64.sum(1)).sum(), W64)
    net = StackedConvNet(model, shape, precision)
    values, again = (net.gradient(W, net.prepare(x), y, zeta[:, None]) for _ in range(2))
    norm = torch.linalg.vector_norm
    row: dict[str, Any] = {"model": name, "precision": precision, "same bits": all(map(torch.equal, values, again))}
    for key, value, exact in zip(("ce", "man", "gradient"), values, (ce64, man64, grad64), strict=True):
        row[key] = (norm(value - exact) / norm(exact)).item()
    return row


def cases(name: str, clients: int, batch: int, precision: str) -> list[Case]:
    """The kernels of one step in order, on tensors of the right shapes."""
    model, shape, W, x, _ = problem(name, clients, batch)
    net = StackedConvNet(model, shape, precision)
    size = net.dtype.itemsize
    share = torch.full((clients, batch), 1 / batch, device=DEVICE)
    zeta = torch.full((clients,), 0.15, device=DEVICE)
    man = torch.empty(clients, 8192, device=DEVICE)
    dW = torch.randn_like(W)
    out = [Case("prepare", lambda: net.prepare(x), 0, 4 * x.numel() * (1 + size / 3))]
    image = net.prepare(x)
    for i, stage in enumerate(net.stages):
        out += stage_cases(net, i, W, image, share, zeta, man, dW)
        image = torch.randn(clients, batch, stage.map[0] // 2, stage.map[1] // 2, stage.out, device=DEVICE)
        image = image.relu().to(net.dtype)
    a = image.flatten(2)
    for i, n in enumerate(net.widths):
        out += linear_cases(
            f"linear{i + 1}", net._rows(W, f"linears.{i}.weight"), a, n, share, zeta, man, net.precision
        )
        a = torch.randn(clients, batch, n, device=DEVICE).relu().to(net.dtype)
    y = torch.zeros(clients, batch, dtype=torch.long, device=DEVICE)
    logits = torch.randn(clients, batch, net.widths[-1], device=DEVICE)
    partial = torch.randn(clients, net.layers, max(net._parts(batch)), device=DEVICE)
    out += [
        Case("head", lambda: head.forward(logits, y, share, partial, net._parts(batch)), 0, 4 * logits.numel()),
        Case("head backward", lambda: head.backward(logits, y, share, zeta, zeta, net.dtype), 0, 6 * logits.numel()),
    ]
    lr = torch.tensor(0.1, device=DEVICE)
    tiles = grid(BLOCK=[2048, 4096, 8192, 16384], num_warps=[4, 8])
    step = Case(
        "clip_update", lambda: update.clip_update(W, dW, lr, 10.0, 1e-3, 0.0),
        0, 16 * W.numel(), tiles, update, "OPTIONS",
    )  # fmt: skip
    return [*out, step]


def stage_cases(
    net: StackedConvNet, i: int, W: Tensor, x: Tensor, share: Tensor, zeta: Tensor, man: Tensor, dW: Tensor
) -> list[Case]:
    stage, precision, norm, strides = net.stages[i], net.precision, net._norm(W, i), net._strides(i)
    rows, bias = net._rows(W, f"convs.{i}.weight"), net._rows(W, f"convs.{i}.bias")
    entries, size = share.numel() * stage.map[0] * stage.map[1] * stage.out, net.dtype.itemsize
    w = conv.pack(rows, stage, precision)
    flops = 2.0 * entries * (stage.image or stage.channels) * stage.kernel**2
    weights = w.numel() * size
    small = share.numel() * stage.pooled * stage.out * (size + 1)
    read = x.numel() * size
    label, chunk = f"conv{i + 1}", stage.windows
    out = [Case(f"{label} pack", lambda: conv.pack(rows, stage, precision), 0, 3 * weights)]
    if i == 0:
        stats = grams = None
        if norm:
            grams = gram.matrices(stage, x, precision)
            stats = gram.statistics(stage, w, norm, grams)
            out += [
                Case(f"{label} Gram matrices",
                     lambda: gram.matrices(stage, x, precision),
                     0, read, grid(BM=[64, 128], num_warps=[4, 8], num_stages=[2, 3, 4]), gram, "MATRICES"),
                Case(f"{label} statistics", lambda: gram.statistics(stage, w, norm, grams),
                     0, 4 * grams.numel(), grid(BO=[32, 64], num_warps=[4, 8]), gram, "STATISTICS"),
            ]  # fmt: skip
        pooled, arg = first_stage.forward(stage, x, w, share, stats, man, strides, precision)
        d = torch.randn_like(pooled)
        gradients = part = first_stage.backward(stage, x, w, share, stats, d, arg, zeta, strides, precision)
        tiles = grid(BM=[32, 64], BO=[32], CHUNK=[chunk] if norm else [256], num_warps=[4], num_stages=[1, 2, 3])
        back = [t | {"CHUNK": n} for t in tiles for n in ([chunk] if norm else [512, 1024])]
        out += [
            Case(f"{label} stage forward",
                 lambda: first_stage.forward(stage, x, w, share, stats, man, strides, precision),
                 flops, read + weights + small, tiles, first_stage, "forward_options"),
            Case(f"{label} stage backward",
                 lambda: first_stage.backward(stage, x, w, share, stats, d, arg, zeta, strides, precision),
                 2 * flops, read + weights + small, back, first_stage, "backward_options"),
        ]  # fmt: skip
        if norm:
            out.append(Case(f"{label} norm gradient",
                            lambda: gram.gradient(stage, w, norm, stats, grams, part, precision),
                            0, 4 * (part.numel() + grams.numel()),
                            grid(BO=[32, 64], PROGRAMS=[800, 3200], num_warps=[4, 8], num_stages=[2]),
                            gram, "GRADIENT"))  # fmt: skip
            gradients, _ = gram.gradient(stage, w, norm, stats, grams, part, precision)
    else:
        z = conv.forward(stage, x, w, bias, precision)
        pooled, arg, stats = activation.forward(stage, z, norm, share, man, strides)
        d = torch.randn_like(pooled)
        dz, _, _ = activation.backward(stage, z, norm, share, pooled, d, arg, stats, zeta, strides)
        gradients = conv.weight_gradient(stage, x, dz, precision)
        tiles = grid(BM=[128, 256], BC=[64], BO=[64], num_warps=[4, 8], num_stages=[2, 3, 4])
        pixel_tiles = (
            grid(BM=[8, 16, 32, 64], CHUNK=[chunk], num_warps=[2, 4, 8])
            if norm
            else [t | {"CHUNK": t["BM"]} for t in grid(BM=[8, 16, 32], num_warps=[2, 4])]
        )
        ranges = grid(BK=[32, 64], BC=[64], BO=[64], num_warps=[4], num_stages=[2, 3], SPLITS=[1, 2, 4, 8, 13])
        out += [
            Case(f"{label} forward", lambda: conv.forward(stage, x, w, bias, precision),
                 flops, read + weights + entries * size, tiles, conv, "_conv_options"),
            Case(f"{label} activation", lambda: activation.forward(stage, z, norm, share, man, strides),
                 0, entries * size + small, pixel_tiles, activation, "launch"),
            Case(f"{label} activation backward",
                 lambda: activation.backward(stage, z, norm, share, pooled, d, arg, stats, zeta, strides),
                 0, 2 * entries * size + small, pixel_tiles, activation, "launch"),
            Case(f"{label} weight gradient", lambda: conv.weight_gradient(stage, x, dz, precision),
                 flops, read + entries * size, ranges, conv, "_weight_options"),
            Case(f"{label} input gradient", lambda: conv.input_gradient(stage, dz, w, precision),
                 flops, read + weights + entries * size, tiles, conv, "_conv_options"),
        ]  # fmt: skip
    target = net._rows(dW, f"convs.{i}.weight")
    total = 4 * (gradients.numel() + gradients[:, 0].numel())
    return [*out, Case(f"{label} unpack", lambda: conv.unpack(gradients, target, stage), 0, total)]


def linear_cases(
    label: str, rows: Tensor, a: Tensor, n: int, share: Tensor, zeta: Tensor, man: Tensor, precision: str
) -> list[Case]:
    clients, batch, i = a.shape
    dz = torch.randn(clients, batch, n, device=DEVICE).to(a.dtype)
    flops, moved = 2.0 * clients * batch * i * n, 4.0 * clients * i * n
    into = torch.empty_like(rows)
    return [
        Case(f"{label} forward",
             lambda: linear.forward(a, rows, n, True, share, man, precision), flops, moved,
             grid(BM=[64], BN=[16, 32], BK=[64, 128], num_warps=[4], num_stages=[4, 5, 6, 8]), linear, "FORWARD"),
        Case(f"{label} weight gradient",
             lambda: linear.weight_gradient(dz, a, into, precision), flops, moved,
             grid(BM=[64, 128], BN=[64, 128], BK=[64], num_warps=[4, 8], num_stages=[1]), linear, "WEIGHT"),
        Case(f"{label} input gradient",
             lambda: linear.input_gradient(dz, rows, a, zeta, share, precision), flops, moved,
             grid(BM=[64], BN=[32, 64], BK=[32, 64], num_warps=[4], num_stages=[4, 6]), linear, "INPUT"),
    ]  # fmt: skip


def step_time(name: str, clients: int, precision: str, batch: int = 50) -> float:
    """Microseconds of a whole SGD step (losses, gradient, clip, decay, update) in a captured graph."""
    model, shape, W, x, y = problem(name, clients, batch)
    net = StackedConvNet(model, shape, precision)
    zeta, lr = torch.full((clients, 1), 0.15, device=DEVICE), torch.tensor(0.01, device=DEVICE)

    def step() -> None:
        _, _, grad = net.gradient(W, net.prepare(x), y, zeta)
        update.clip_update(W, grad, lr, 10.0, 1e-3, 0.0)

    return graph_time(step, calls=5)


def ceilings() -> tuple[float, float]:
    """Measured bf16 matrix rate (TFLOP/s) and copy bandwidth (TB/s)."""
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    big = torch.randn(2**29, device=DEVICE)
    to = torch.empty_like(big)
    product = 2 * 8192**3 / graph_time(lambda: a @ a, 5) / 1e6
    return product, 8 * big.numel() / graph_time(lambda: torch.add(big, 1.0, out=to), 5) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["cifar"], choices=list(MODELS))
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 22, 90])
    parser.add_argument("--precision", nargs="+", default=["bf16"], choices=["bf16", "tf32", "fp32"])
    parser.add_argument("--check", nargs="*", default=["fp32", "tf32", "bf16"], help="precisions to check")
    parser.add_argument("--only", nargs="+", default=[""], help="kernels whose name contains one of these")
    parser.add_argument("--tune", action="store_true", help="try several tile sizes for each kernel")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    args = parser.parse_args()
    torch.manual_seed(0)
    rate, bandwidth = ceilings()
    print(f"{torch.cuda.get_device_name()}: {rate:.0f} TFLOP/s bf16, {bandwidth:.2f} TB/s copy")
    record: dict[str, Any] = {"rate": rate, "bandwidth": bandwidth, "errors": [], "kernels": [], "steps": []}

    def save() -> None:
        if args.json:
            args.json.write_text(json.dumps(record, indent=1))

    for name, precision in itertools.product(args.model, args.check):
        record["errors"].append(errors(name, precision))
        print({k: f"{v:.1e}" if isinstance(v, float) else v for k, v in record["errors"][-1].items()}, flush=True)
    for name, precision, clients in itertools.product(args.model, args.precision, args.clients):
        time = step_time(name, clients, precision)
        record["steps"].append({"model": name, "precision": precision, "clients": clients, "us": time})
        print(f"{name} {precision} S={clients}: {time:.0f} µs a step, {time / clients:.1f} a client", flush=True)
        save()
        for case in cases(name, clients, 50, precision):
            if not any(part in case.name for part in args.only):
                continue
            rows = []
            for options in [None, *(case.grid if args.tune else [])]:
                try:
                    time = case.time(options)
                except Exception as error:  # a tile that does not fit the card
                    print(f"    {case.name} {options}: {type(error).__name__} {str(error)[:100]}")
                    continue
                rows.append({"us": time, "options": options})
            rows.sort(key=lambda row: row["us"])
            for row in rows:
                row |= {"model": name, "precision": precision, "clients": clients, "kernel": case.name}
            record["kernels"] += rows
            default = next(row["us"] for row in rows if row["options"] is None)
            print(
                f"  {case.name:28s} {default:7.1f} µs  {case.flops / default / 1e6:6.1f} TFLOP/s "
                f"{case.bytes / default / 1e6:5.2f} TB/s",
                *(f"| {row['us']:.1f} {list((row['options'] or {}).values())}" for row in rows[:3] if args.tune),
                flush=True,
            )
            save()


if __name__ == "__main__":
    main()
