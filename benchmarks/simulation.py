"""One federated round on the paper's CIFAR CNN: fedman against plain loops, the same work, interleaved in one run.

    python benchmarks/simulation.py [--device cpu|cuda] [--algorithm fedavg ...] [--zeta 0.15] [--clients 4]

- research loop: the style of the field's published code: one client after the other, a DataLoader with per-sample numpy
  augmentation, a host sync every step, MAN as `a.square().mean()`, the algorithm's terms parameter by parameter;
- tuned loop (FedAvg): one client after the other as a careful PyTorch user writes it: batches sliced and augmented as
  tensors, channels_last, no sync, `fedman.ActivationNorm`.

Both use all cores. The data are random images; times do not depend on their contents.
"""

import argparse
import copy
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fedman import ActivationNorm
from fedman.algorithms import ALGORITHMS
from fedman.execution.device import matmul_precision
from fedman.models.convnet import cifar_cnn
from fedman.training.aggregate import collect
from fedman.training.settings import Training
from man_cost import naive_man
from rounds import Rounds

SIZE, EPOCHS, BATCH, CLASSES = 500, 5, 50, 100
MACS = 14.7e6  # of one image forward; a training step is three times that, a SAM step six
HOW = Training(epochs=EPOCHS, batch_size=BATCH)
SAM_TYPE = ("fedsam", "fedasam", "fedspeed")


class Augmented(Dataset):
    """Per-sample augmentation in numpy."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y, self.rng = x, y, np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        image = self.x[i]
        if self.rng.random() > 0.5:
            image = image[:, :, ::-1]
        if self.rng.random() > 0.5:
            padded = np.pad(image, ((0, 0), (4, 4), (4, 4)))
            down, right = self.rng.integers(0, 9, 2)
            image = padded[:, down : down + 32, right : right + 32]
        return torch.tensor(image.copy()), self.y[i]


def research_loop(model, images, labels, zeta, device, algorithm):
    """One client's local work; returns its weights."""
    model, losses = copy.deepcopy(model), []
    man = naive_man(model) if zeta else None
    parameters = list(model.parameters())
    theta = [p.detach().clone() for p in parameters]  # the model sent; h, g, c of a client are as large
    memory = [torch.zeros_like(p) for p in theta]
    decay = HOW.weight_decay + (0.01 if algorithm in ("feddyn", "fedspeed") else 0)
    optimiser = torch.optim.SGD(parameters, HOW.lr, weight_decay=decay)

    def backward(x, y):
        loss = F.cross_entropy(model(x), y)
        if man is not None:
            loss = loss + zeta * man()
        optimiser.zero_grad()
        loss.backward()
        return loss

    loader = DataLoader(Augmented(images, labels), BATCH, shuffle=True)
    for _ in range(EPOCHS):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = backward(x, y)
            if algorithm in SAM_TYPE:
                climbed = climb(parameters, algorithm)
                backward(x, y)
                with torch.no_grad():
                    for p, e in zip(parameters, climbed, strict=True):
                        p.sub_(e)
            for p, sent, kept in zip(parameters, theta, memory, strict=True):
                p.grad += term(algorithm, p.detach(), sent, kept)
            nn.utils.clip_grad_norm_(parameters, HOW.clip)
            optimiser.step()
            losses.append(loss.item())
    return model


@torch.no_grad()
def climb(parameters, algorithm):
    """The step of length ρ uphill; returns it, to be taken back."""
    scale = [p.abs() + 0.2 if algorithm == "fedasam" and p.dim() > 1 else 1.0 for p in parameters]
    norm = torch.stack([(t * p.grad).norm() for p, t in zip(parameters, scale, strict=True)]).norm()
    steps = [t * t * p.grad * (0.05 / (norm + 1e-16)) for p, t in zip(parameters, scale, strict=True)]
    for p, e in zip(parameters, steps, strict=True):
        p.add_(e)
    return steps


def term(algorithm, w, theta, memory):
    """What the algorithm adds to a parameter's gradient."""
    return {
        "fedprox": lambda: 1e-4 * (w - theta),
        "feddyn": lambda: 0.01 * (memory - theta),
        "fedspeed": lambda: 0.01 * (memory - theta),
        "feddc": lambda: 0.01 * (w + memory - theta) + memory - memory,
        "scaffold": lambda: memory - memory,
    }.get(algorithm, lambda: 0)()


def tuned_loop(model, images, labels, zeta, device, algorithm):
    """The same for FedAvg."""
    model = copy.deepcopy(model)
    man = ActivationNorm(model) if zeta else None
    optimiser = torch.optim.SGD(model.parameters(), HOW.lr, weight_decay=HOW.weight_decay)
    x_all = F.pad(torch.as_tensor(images, device=device), (4, 4, 4, 4)).contiguous(memory_format=torch.channels_last)
    y_all = torch.as_tensor(labels, device=device)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(y_all), device=device).split(BATCH):
            down, right = torch.randint(0, 9, (2,)).tolist()
            x = x_all[index][:, :, down : down + 32, right : right + 32]
            x = x.flip(-1) if torch.rand(()) < 0.5 else x
            loss = F.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y_all[index])
            if man:
                loss = loss + zeta * man()
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), HOW.clip)
            optimiser.step()
    return model


def phases(rounds: Rounds, clients: list[int]) -> dict[str, float]:
    """Milliseconds of the parts of a round, for one chunk of clients and one evaluation."""
    parts, started, federation, state = {}, time.perf_counter(), rounds.federation, rounds.state

    def lap(name: str) -> None:
        nonlocal started
        if federation.device.type == "cuda":
            torch.cuda.synchronize()
        parts[name] = (time.perf_counter() - started) * 1e3
        started = time.perf_counter()

    now = rounds.plan(clients)
    federation.work(federation.draw(now.round, clients), state.server, state.clients.memories(clients))
    lap("draw batches, copy states")
    trained = rounds.backend.train([now], [])
    lap("the same and the local steps")
    list(collect([now], trained))
    lap("uploads, server")
    rounds.evaluate()
    lap("one evaluation")
    return parts


def ceiling(device: torch.device, precision: str) -> float:
    """FLOP/s of a large matrix product: what the arithmetic could reach."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    with matmul_precision(precision):
        return 2 * n**3 / min(timed(lambda: a @ a, device) for _ in range(5))


def timed(work, device: torch.device) -> float:
    """Seconds."""
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def compare(algorithm: str, options: argparse.Namespace) -> None:
    """One algorithm: the loops and fedman, interleaved."""
    device, clients = torch.device(options.device), options.clients
    rounds = Rounds(clients, algorithm, options.device, options.precision, options.zeta)
    y = rounds.y
    floats = ((rounds.x / 255 - 0.5) / 0.25).astype(np.float32).transpose(0, 3, 1, 2).copy()
    torch.manual_seed(0)
    model = cifar_cnn((3, 32, 32), CLASSES).to(device)
    cohort = list(range(clients))

    def loop(local):
        for k in range(clients):
            own = slice(k * SIZE, (k + 1) * SIZE)
            local(model, floats[own], y[own], options.zeta, device, algorithm)

    works = {
        "research": lambda: loop(research_loop),
        "tuned": lambda: loop(tuned_loop),
        "fedman": lambda: rounds.play(cohort),
    }
    seconds: dict[str, list[float]] = {name: [] for name in options.only if name != "tuned" or algorithm == "fedavg"}
    rounds.play(cohort)  # warm up
    for _ in range(options.repeats):
        for name, values in seconds.items():
            values.append(timed(works[name], device) * 10 / clients)
    flop = 10 * EPOCHS * SIZE * MACS * 2 * 3 * (2 if algorithm in SAM_TYPE else 1)
    top = ceiling(device, options.precision)
    print(
        f"\n{algorithm}, zeta {options.zeta}, {options.device}, {options.precision}, {torch.get_num_threads()} threads"
    )
    print(
        f"{'':10}{'s a round of ten':>18}{'s per 500 rounds':>18}{'TFLOP/s':>10}{'of a product':>14}{'fedman is':>11}"
    )
    ours = statistics.median(seconds["fedman"])
    for name, values in seconds.items():
        median = statistics.median(values)
        rate = flop / median
        row = f"{median:18.3f}{500 * median:18.1f}{rate / 1e12:10.3f}{100 * rate / top:12.0f} %{median / ours:10.2f}x"
        print(f"{name:10}{row}", flush=True)
    chunk = list(range(min(rounds.backend.chunk, clients)))
    rounds.evaluate()  # warm up
    shown = ", ".join(f"{name} {ms:.1f}" for name, ms in phases(rounds, chunk).items())
    print(f"ms of a round of {len(chunk)} client(s), 1000 test images: {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--algorithm", nargs="+", default=["fedavg"], choices=ALGORITHMS)
    parser.add_argument("--zeta", type=float, default=0.15)
    parser.add_argument("--clients", type=int, default=4, help="in the round; the time is scaled to ten")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--only", nargs="*", default=["research", "tuned", "fedman"])
    options = parser.parse_args()
    for algorithm in options.algorithm:
        with matmul_precision(options.precision):
            compare(algorithm, options)


if __name__ == "__main__":
    main()
