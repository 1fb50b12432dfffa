"""Flower's simulation engine against fedman's in-process simulator: one FedAvg round of ten of 100 clients, paper CNN.

    python benchmarks/flower.py [--epochs 5] [--rounds 3] [--repeats 2] [--zeta 0.15]
    python benchmarks/flower.py --bytes        # bytes sent in a round, by algorithm
    python benchmarks/flower.py --deployment   # SuperLink and two SuperNodes on loopback, with both SuperExecs

- fedman: `fedman.run`, in this process, with its default precision (bf16 if the CPU supports it) and in fp32;
- fedman on Flower: `fedman flower simulate`, the same work and the same bits, one CPU per client;
- Flower's own: its FedAvg strategy with its default of two CPUs per client, and a typical client (DataLoader,
  augmentation in numpy, a sync per step; MAN, with --zeta, by hooks and `a.square().mean()`), in fp32 and under
  autocast in bf16.

The variants alternate; the first round after each start (imports, data) is not counted. The images are random.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.logger import update_console_handler
from torch import nn
from torch.utils.data import DataLoader

from fedman.algorithms import ALGORITHMS
from fedman.config import Config, resolve
from fedman.data import Dataset, load
from fedman.execution.base import Batch
from fedman.execution.one_by_one import OneByOne
from fedman.flower.app import new_project
from fedman.flower.exchange import exchange
from fedman.flower.messages import FIGURES, REPLY, ROUND, SERVER, TERM, UPLOAD, Order, SampleKind
from fedman.flower.server_options import ServerOptions
from fedman.flower.simulation import simulate
from fedman.models.convnet import cifar_cnn
from fedman.models.parameters import flatten
from fedman.penalties import MAN
from fedman.runs import experiment
from fedman.runs.folder import RunFolder
from fedman.tasks import Classification

CLIENTS, COHORT, SIZE, CLASSES = 100, 10, 500, 100


def settings(folder: Path, epochs: int, rounds: int, size: int, zeta: float) -> tuple[Config, Dataset]:
    """Random images of CIFAR's shape; a test set so small that evaluation takes no time."""
    rng, path = np.random.default_rng(0), folder / f"images-{size}.npz"
    x = rng.integers(0, 256, (CLIENTS * size + 100, 32, 32, 3), dtype=np.uint8)
    y = np.arange(len(x)) % CLASSES
    np.savez(path, x_train=x[100:], y_train=y[100:], x_test=x[:100], y_test=y[:100])
    keys = {"dataset": f"npz:{path}", "model": "cifar_cnn", "augment": True, "partition": "iid", "cohort": "fixed"}
    keys |= {"clients": CLIENTS, "epochs": epochs, "rounds": rounds, "eval_others_every": rounds, "zeta": zeta}
    config = resolve(keys)
    return config, load(config.dataset)


def in_process(config: Config, data: Dataset) -> list[float]:
    """Seconds of each round but the first."""
    return [record["seconds"] for record in experiment.run(config, data=data, device="cpu").rounds[1:]]


def on_flower(config: Config, folder: Path) -> list[float]:
    out = Path(tempfile.mkdtemp(dir=folder))
    return [record["seconds"] for record in simulate(config, ServerOptions(), out=out, device="cpu").rounds[1:]]


def stock_flower(epochs: int, rounds: int, size: int, zeta: float, bf16: bool = False) -> list[float]:
    """A Flower app as users write it: FedAvg, state dicts, a plain training loop, under autocast with `bf16`."""
    client, server, times = ClientApp(), ServerApp(), []

    @client.train()
    def train(message: Message, context: Context) -> Message:
        from man_cost import naive_man
        from simulation import Augmented

        rng = np.random.default_rng(int(context.node_config["partition-id"]))
        images = rng.normal(size=(size, 3, 32, 32)).astype(np.float32)
        labels = rng.integers(0, CLASSES, size)
        model = cifar_cnn((3, 32, 32), CLASSES)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
        man = naive_man(model) if zeta else None
        for _ in range(epochs):
            for x, y in DataLoader(Augmented(images, labels), 50, shuffle=True):
                optimiser.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    logits = model(x)
                loss = F.cross_entropy(logits.float(), y)
                if man is not None:
                    loss = loss + zeta * man()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                optimiser.step()
                loss.item()
        records = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": size})}
        return Message(RecordDict(records), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        arrays = ArrayRecord(cifar_cnn((3, 32, 32), CLASSES).state_dict())

        def evaluate(t: int, arrays: ArrayRecord) -> MetricRecord:
            times.append(time.perf_counter())
            return MetricRecord({"round": t})

        result = strategy.start(grid, arrays, num_rounds=rounds, evaluate_fn=evaluate)
        assert len(result.train_metrics_clientapp) == rounds, "clients have failed"

    run_simulation(server, client, CLIENTS)
    return [b - a for a, b in pairwise(times[1:])]


def deployment(folder: Path, warm: bool, rounds: int) -> list[float]:
    """Seconds of each round but the first, with two clients on loopback that have almost no work."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.flower.deployment import Deployment

    root = Path(tempfile.mkdtemp(dir=folder))
    new_project(root / "app")
    with Deployment(root / "net", env={"FEDMAN_MEMORY": str(root / "memory")}, warm=warm) as net:
        net.start_nodes({f"node{k}": f"partition-id={k}" for k in range(2)})
        words = f"dataset=digits clients=2 participation=1 epochs=1 rounds={rounds} algorithm=feddc wait=300"
        run = net.run(root / "app", f'settings="{words}" out="{root}/out"', timeout=1200)
        assert run.completed, run.details
    return [record["seconds"] for record in RunFolder(root / "out").read_rounds()[1:]]


def wire(records: RecordDict) -> int:
    """Bytes of a message's contents as Flower sends them."""
    return sum(len(part.deflate()) for part in get_all_nested_objects(records).values())


def print_bytes() -> None:
    """The messages of one client in one round, for the paper's CIFAR-100 model."""
    model = cifar_cnn((3, 32, 32), CLASSES)
    w, x, y = flatten(model), torch.zeros(1, 1, 3, 32, 32), torch.zeros(1, 1, dtype=torch.long)
    terms = OneByOne(model, Classification(), MAN()).penalty_terms(w[None], Batch(x, y))
    figures = MetricRecord(dict.fromkeys(("loss", *(TERM + name for name in terms)), 1.0))
    samples = json.dumps(asdict(SampleKind((3, 32, 32), CLASSES, True, (0.5,) * 3, (0.25,) * 3)))

    def arrays(*names: str) -> ArrayRecord:
        return ArrayRecord({name: Array(w.numpy() + i) for i, name in enumerate(names)})

    print(f"{len(w)} parameters; bytes of one client in one round\n")
    print("| algorithm | down | bytes | up | bytes |\n| --- | --- | --- | --- | --- |")
    for name, kind in ALGORITHMS.items():
        names = exchange(kind())
        flat = resolve({"dataset": "cifar100", "algorithm": name, "zeta": 0.15}).flat()
        order = Order("0" * 32, 1, 1, 1.0, 0, json.dumps(flat, sort_keys=True), samples)
        reply = ConfigRecord(order.tag)
        down = wire(RecordDict({ROUND: ConfigRecord(vars(order)), SERVER: arrays(*names.down)}))
        up = wire(RecordDict({REPLY: reply, UPLOAD: arrays(*names.up), FIGURES: figures}))
        cells = [kind.title, ", ".join(names.down), f"{down:,}", ", ".join(names.up), f"{up:,}"]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--size", type=int, default=SIZE, help="samples of a client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--zeta", type=float, default=0.0)
    parser.add_argument("--only", nargs="*", help="names as in the table")
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--deployment", action="store_true")
    options = parser.parse_args()
    update_console_handler(level=logging.CRITICAL)
    if options.bytes:
        return print_bytes()
    with tempfile.TemporaryDirectory() as name:
        folder, work = Path(name), f"{COHORT} of {CLIENTS} clients, {options.size} samples"
        work += f", {options.epochs} epochs, ζ={options.zeta:g}"
        if options.deployment:
            work = "two clients on loopback"
            ways = {
                "processes forked from a warm one": lambda: deployment(folder, True, options.rounds),
                "a new Python for every message": lambda: deployment(folder, False, options.rounds),
            }
        else:
            config, data = settings(folder, options.epochs, options.rounds, options.size, options.zeta)
            ways = {
                "fedman": lambda: in_process(config, data),
                "fedman, fp32": lambda: in_process(config.model_copy(update={"precision": "fp32"}), data),
                "fedman on Flower": lambda: on_flower(config, folder),
                "Flower's own": lambda: stock_flower(options.epochs, options.rounds, options.size, options.zeta),
                "Flower's own, bf16": lambda: stock_flower(
                    options.epochs, options.rounds, options.size, options.zeta, bf16=True
                ),
            }
        compare(work, {n: way for n, way in ways.items() if not options.only or n in options.only}, options.repeats)


def compare(work: str, ways: dict[str, Callable[[], list[float]]], repeats: int) -> None:
    """Run all ways in turn; print the median round of each, and its ratio to the first."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            times[name] += way()
            print(f"{name}: {', '.join(f'{t:.2f}' for t in times[name])} s", flush=True)
    base = statistics.median(next(iter(times.values())))
    print(f"\n| {work} | s a round | times the first |")
    print("| --- | --- | --- |")
    for name, all_times in times.items():
        middle = statistics.median(all_times)
        print(f"| {name} | {middle:.2f} | {middle / base:.2f}x |")


if __name__ == "__main__":
    main()
