"""What any model costs: a client's epoch of 500 images, in ms, against one model trained centrally on as many.

    python benchmarks/models.py [MODEL ...] [--device cpu|cuda] [--repeats 5] [--samples 500] [--epochs 5]
    python benchmarks/models.py --bits [MODEL ...]
    python benchmarks/models.py --kernels [MODEL ...]
    python benchmarks/models.py --inductor realize_reads_threshold=5 [MODEL ...]

- plain: a loop over clients in plain PyTorch, as other simulators have: load, forward, backward, clip, SGD;
- fedman: a round of ten clients and five epochs, FedAvg, without MAN and with ζ = 0.15, over its clients and epochs;
- SAM: a round of FedSAM over one of FedAvg, which takes two gradients a step;
- central: one model in batches of 500 images; on a GPU compiled and in a CUDA graph, with kernels that repeat their
  bits as fedman's do (with `--fastest` neither do);
- fastest: central training with the fastest kernels (`cudnn.benchmark`), whatever fedman uses.

All are played in turns. Batches are of 50 images, the images random bytes. `--bits` plays three rounds twice, alone and
two runs stacked, with two clients more than a block, and says whether the weights are the same to the bit; a second
process with empty caches of compiled code must print the same digests. `--kernels` says what the GPU's time goes
into. `--inductor` changes a whole number among the compiler's settings (`fedman.execution.compiled.ON_GPU`).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import re
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedman.backends.in_process import InProcess
from fedman.config import resolve
from fedman.data import Dataset
from fedman.execution.compiled import ON_GPU
from fedman.execution.device import determinism, device_name, matmul_precision, pick_device
from fedman.models import build as build_model
from fedman.runs.build import Built, build
from fedman.training.aggregate import collect
from fedman.training.federation import Assignment
from fedman.training.round import Round
from own_parts import seconds

CLIENTS, BATCH, CLASSES, SHAPE = 10, 50, 100, (3, 32, 32)
LR, DECAY, CLIP = 0.05, 1e-3, 10.0


def user_cnn() -> nn.Module:
    """The paper's sizes, without its nonlinearity and pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5), nn.LeakyReLU(), nn.AvgPool2d(2), nn.Conv2d(64, 64, 5), nn.LeakyReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(1600, 384), nn.LeakyReLU(), nn.Linear(384, CLASSES),
    )  # fmt: skip


class ViT(nn.Module):
    """Patches of 4 × 4, six layers of `nn.TransformerEncoder` of width 192."""

    def __init__(self, width: int = 192, depth: int = 6, heads: int = 3) -> None:
        super().__init__()
        self.patch, self.position = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.zeros(1, 64, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.patch(x).flatten(2).transpose(1, 2) + self.position).mean(1))


class LSTM(nn.Module):
    """Two layers of 256 over the 32 rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(96, 256, 2, batch_first=True), nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.flatten(1).unflatten(1, (32, 96)))[0][:, -1])


OWN: dict[str, Callable[[], nn.Module]] = {"user_cnn": user_cnn, "vit": ViT, "lstm": LSTM}
MODELS = ("cifar_cnn", "user_cnn", "resnet18_gn", "vit", "lstm", "dropout_cnn", "resnet18_bn")


def make(name: str) -> nn.Module:
    return OWN[name]() if name in OWN else build_model(name, SHAPE, CLASSES)


class Federated:
    """Rounds of fedman, each of all ten clients; or of several runs stacked."""

    def __init__(
        self,
        model: nn.Module,
        device: str,
        precision: str,
        samples: int,
        epochs: int,
        clients: int = CLIENTS,
        **keys: object,
    ) -> None:
        self.cohort = list(range(clients))
        rng = np.random.default_rng(0)
        x = rng.integers(0, 256, (clients * samples, 32, 32, 3), dtype=np.uint8)
        y = rng.integers(0, CLASSES, len(x))
        data = Dataset("cifar100", x, y, x[:500], y[:500], CLASSES, (0.5,) * 3, (0.25,) * 3, True)
        zetas = keys.pop("zetas", (0.0,))
        configs = [
            resolve({
                "dataset": "cifar100", "clients": clients, "participation": 1.0, "epochs": epochs, "lr": LR,
                "zeta": zeta, "rounds": 5000, "precision": precision, **keys,
            })
            for zeta in zetas
        ]  # fmt: skip
        parts = [np.arange(samples) + samples * k for k in self.cohort]
        self.built: Built = build(configs, data, device, model=model, parts=parts, whole_run=True)
        self.backend: InProcess = self.built.in_process
        self.states = [federation.start() for federation in self.built.federations]

    def play(self) -> None:
        """A round. As in a run, the next one's batches are drawn while the GPU is at work."""
        now, upcoming = self._assignments(0), self._assignments(1)
        list(collect(now, self.backend.train(now, upcoming)))

    def _assignments(self, ahead: int) -> list[Assignment]:
        return [
            Assignment(federation, state, Round(state.round + ahead, self.cohort, LR))
            for federation, state in zip(self.built.federations, self.states, strict=True)
        ]

    @property
    def execution(self) -> str:
        return self.built.executor.execution.title

    def bits(self, rounds: int) -> str:
        """A digest of the servers' models after some rounds."""
        for _ in range(rounds):
            self.play()
        w = torch.stack([state.server["w"] for state in self.states])
        return hashlib.sha256(w.cpu().numpy().tobytes()).hexdigest()[:16]


def autocast(device: str, precision: str) -> object:
    # the casts of a captured graph must be in the graph
    return torch.autocast(device, torch.bfloat16, cache_enabled=False) if precision == "bf16" else nullcontext()


def loss_of(net: nn.Module, device: str, precision: str) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        with autocast(device, precision):
            out = net(x)
        return cross_entropy(out.float(), y)

    return loss


def descend(weights: list[nn.Parameter], loss: Tensor) -> None:
    """A clipped step of SGD."""
    g = torch.autograd.grad(loss, weights)
    norm = torch.stack(torch._foreach_norm(g)).norm()
    g = torch._foreach_mul(g, (CLIP / (norm + 1e-6)).clamp(max=1))
    with torch.no_grad():
        torch._foreach_mul_(weights, 1 - LR * DECAY)
        torch._foreach_add_(weights, g, alpha=-LR)


def plain(model: nn.Module, device: str, precision: str, samples: int) -> Callable[[], None]:
    """An epoch of one client in plain PyTorch, from the server's model on."""
    net, start = model.to(device), [p.detach().clone().to(device) for p in model.parameters()]
    x, y = torch.randn(samples, *SHAPE, device=device), torch.randint(0, CLASSES, (samples,), device=device)
    loss, weights = loss_of(net, device, precision), list(net.parameters())

    def epoch() -> None:
        with torch.no_grad():
            torch._foreach_copy_(weights, start)
        for at in torch.randperm(samples, device=device).split(BATCH):
            descend(weights, loss(x[at], y[at]))

    return epoch


def central(
    model: nn.Module, device: str, precision: str, samples: int, deterministic: bool = False
) -> Callable[[], None]:
    """`samples` images in one batch of one model: on a GPU compiled, and replayed from a CUDA graph."""
    net = model.to(device)
    x, y = torch.randn(samples, *SHAPE, device=device), torch.randint(0, CLASSES, (samples,), device=device)
    loss, weights = loss_of(net, device, precision), list(net.parameters())
    if device == "cpu":
        return lambda: descend(weights, loss(x, y))
    torch._dynamo.reset()  # of many models the last would not be compiled any more
    loss = torch.compile(loss)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), determinism(deterministic, device):
        for _ in range(2):
            descend(weights, loss(x, y))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            descend(weights, loss(x, y))

    def replay(*kept: object) -> None:  # the graph reads the memory of these tensors
        graph.replay()

    return partial(replay, x, y, net, weights)


def repeated(call: Callable[[], None], times: int) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(times):
            call()

    return calls


def measure(name: str, device: str, precision: str, samples: int, epochs: int, repeats: int) -> None:
    """A line of the table."""
    started = time.perf_counter()
    torch.manual_seed(0)
    options = device, precision, samples
    federated = {
        "0": Federated(make(name), *options, epochs),
        "0.15": Federated(make(name), *options, epochs, zetas=(0.15,)),
        "SAM": Federated(make(name), *options, epochs, algorithm="fedsam"),
    }
    several = 20 if device == "cuda" else 1
    calls = {which: (made.play, CLIENTS * epochs) for which, made in federated.items()}
    calls["plain"] = repeated(plain(make(name), *options), CLIENTS), CLIENTS
    alike = central(make(name), *options, torch.are_deterministic_algorithms_enabled())
    calls["central"] = repeated(alike, several), several
    calls["fastest"] = repeated(central(make(name), *options), several), several
    for call, _ in calls.values():
        call()
    ready = time.perf_counter() - started
    times: dict[str, list[float]] = {which: [] for which in calls}
    for _ in range(repeats):
        for which, (call, epochs_of_a_client) in calls.items():
            times[which].append(1e3 * seconds(device, call) / epochs_of_a_client)
    ms = {which: statistics.median(v) for which, v in times.items()}
    print(
        f"{name:<12}{ms['plain']:9.2f}{ms['0']:9.2f}{ms['0.15']:9.2f}{ms['0.15'] / ms['0']:7.2f}"
        f"{ms['SAM'] / ms['0']:7.2f}{ms['central']:9.2f}{ms['0'] / ms['central']:8.2f}"
        f"{ms['fastest']:9.2f}{ms['0'] / ms['fastest']:8.2f}{ms['0'] / ms['plain']:9.3f}"
        f"{ready:7.0f} s  {federated['0'].execution}",
        flush=True,
    )


def repeat(name: str, device: str, precision: str, samples: int, epochs: int) -> None:
    """Whether two runs with one seed have the same bits."""
    words = []
    for title, zetas in (("alone", (0.15,)), ("stacked", (0.0, 0.15))):
        found = []
        for _ in range(2):
            torch.manual_seed(0)
            made = Federated(make(name), device, precision, samples, epochs, clients=CLIENTS + 2, zetas=zetas)
            found.append(made.bits(3))
            execution = made.execution
            del made
            gc.collect()
            torch.cuda.empty_cache()  # where processes share a GPU, the others have room
        words.append(f"{title} {'same' if found[0] == found[1] else 'DIFFERENT'} {found[0]}")
    print(f"{name:<12}{', '.join(words)}, {execution}", flush=True)


KINDS = {
    "update, clip, packed weights": r"^_(update|squares|pack)|multi_tensor|foreach",
    "weight gradients": r"weight_gradient|wgrad",
    "convolutions": r"^_conv|fprop|dgrad|convol",
    "attention": r"sdpa|flash|fusion::",
    "matrix products": r"nvjet|gemm|splitK",
    "sums, and what is computed on the way": r"triton_(red|per)|reduce_kernel",
    "other norms, activations, casts": r"triton|elementwise",
}
"""Kernels by their names; the first that fits counts."""


def profile(name: str, device: str, precision: str, samples: int, epochs: int) -> None:
    """The GPU's time for a client's epoch by kinds of kernels, and their launches: fedman's without MAN and with it,
    and central training's."""
    torch.manual_seed(0)
    without, with_man = (Federated(make(name), device, precision, samples, epochs, zetas=(z,)) for z in (0.0, 0.15))
    alike = central(make(name), device, precision, samples, torch.are_deterministic_algorithms_enabled())
    steps = -(-samples // BATCH) * epochs
    for title, call, share in (
        ("ζ = 0", without.play, CLIENTS * epochs),
        ("ζ = 0.15", with_man.play, CLIENTS * epochs),
        ("central", repeated(alike, steps), steps),
    ):
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        found: dict[str, list[float]] = {}
        for event in seen.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kind = next((k for k, pattern in KINDS.items() if re.search(pattern, event.name)), "others")
                found.setdefault(kind, []).append(event.device_time)
        total, launches = sum(map(sum, found.values())), sum(map(len, found.values()))
        print(f"{name}, {title}: {1e-3 * total / share:.2f} ms, {launches / steps:.0f} launches a step")
        for kind, times in sorted(found.items(), key=lambda item: -sum(item[1])):
            print(f"  {1e-3 * sum(times) / share:6.2f} ms{len(times) / steps:6.0f}  {kind}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="")
    parser.add_argument("--samples", type=int, default=500, help="images of a client, and of a central batch")
    parser.add_argument("--epochs", type=int, default=5, help="of a round")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bits", action="store_true", help="compare the bits of two runs")
    parser.add_argument("--kernels", action="store_true", help="what the GPU's time goes into")
    parser.add_argument("--fastest", action="store_true", help="deterministic=false")
    parser.add_argument("--inductor", nargs=1, action="extend", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    ON_GPU.update((key, int(value)) for key, _, value in (setting.partition("=") for setting in options.inductor))
    device = pick_device(options.device)
    precision = options.precision or ("bf16" if device == "cuda" else "fp32")
    with matmul_precision(precision), determinism(not options.fastest, device):
        setting = f"{precision}, torch {torch.__version__}, {options.samples} images"
        print(", ".join([device_name(torch.device(device)), setting, *options.inductor]))
        if not options.bits and not options.kernels:
            columns = (("plain", 9), ("ζ=0", 9), ("ζ=0.15", 9), ("MAN", 7), ("SAM", 7), ("central", 9), ("ratio", 8),
                       ("fastest", 9), ("ratio", 8), ("of plain", 9))  # fmt: skip
            print(f"{'ms':<12}{''.join(f'{title:>{width}}' for title, width in columns)}  ready  execution", flush=True)
        for name in options.models:
            if options.bits:
                repeat(name, device, precision, options.samples, options.epochs)
            elif options.kernels:
                profile(name, device, precision, options.samples, options.epochs)
            else:
                measure(name, device, precision, options.samples, options.epochs, options.repeats)


if __name__ == "__main__":
    main()
