"""How a federation's cost grows with the clients that there are, when few of them take part in a round.

    python benchmarks/many_clients.py [--clients 1000 10000 100000] [--algorithms fedavg feddc] [--device cuda]

The paper's CIFAR CNN, random images, `--samples` for each client, `--cohort` clients a round. For every case, in a
process of its own: seconds for the partition and for all else before the first round, and memory then beside the
data; seconds of a round (median, without evaluation) and what times those among the first number of clients that is;
seconds of a checkpoint after these rounds and what it writes, and of one when nothing has changed; seconds to resume
from it, after which a further round must give the same bits as without. CPU: seconds of the processors' time, which
hardly depends on what else a machine does. `--fill` first gives so many clients a row, and `--share` is the part of
free memory that rows may take: together they show the cost of rows in the host's memory and on the disk.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedman.backends.in_process import InProcess
from fedman.config import resolve
from fedman.data import Dataset, partition
from fedman.execution.device import matmul_precision
from fedman.runs import checkpoint, row_file
from fedman.runs.build import build
from fedman.runs.row_file import RowFile
from fedman.training import client_rows
from fedman.training.aggregate import Outcome, collect
from fedman.training.federation import Assignment, Federation
from fedman.training.round import Round, Schedule
from fedman.training.state import RunState

COLUMNS = {
    "clients": "{:,}", "algorithm": "{}", "partition s": "{:.1f}", "start s": "{:.1f}", "start GB": "{:.2f}",
    "round s": "{:.3f}", "times": "{:.2f}", "round CPU s": "{:.2f}", "CPU times": "{:.2f}", "checkpoint s": "{:.2f}",
    "MB": "{:.0f}", "unchanged s": "{:.3f}", "resume s": "{:.2f}", "rows": "{}",
}  # fmt: skip


class Clock:
    """Seconds, and seconds of the processors, of what happened within."""

    wall = cpu = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        started = time.perf_counter(), time.process_time()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.wall, self.cpu = time.perf_counter() - started[0], time.process_time() - started[1]


def random_images(n: int) -> Dataset:
    """Images like CIFAR-10's, of which a thousand are the test set."""
    rng, x = np.random.default_rng(0), np.empty((n, 32, 32, 3), dtype=np.uint8)
    for i in range(0, n, 10_000):
        x[i : i + 10_000] = rng.integers(0, 256, x[i : i + 10_000].shape, dtype=np.uint8)
    y = rng.integers(0, 10, n)
    return Dataset("cifar10", x, y, x[:1000], y[:1000], 10, (0.5,) * 3, (0.25,) * 3, True)


def resident(field: str) -> float:
    """GB of this process's memory: VmRSS now, VmHWM at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith(field))


def measure(clients: int, algorithm: str, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    client_rows.SHARE = options.share
    data = random_images(clients * options.samples)
    keys = {
        "dataset": "cifar10", "clients": clients, "participation": options.cohort / clients, "cohort": "fixed",
        "algorithm": algorithm, "partition": "iid", "epochs": 1, "checkpoint_seconds": 0.0,
    }  # fmt: skip
    config, clock = resolve(keys), Clock()
    with clock.running():
        parts = partition.clients_of(data, config.partition, clients)
    split, before = clock.wall, resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest from here on
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        with clock.running():
            built = build([config], data, options.device, parts=parts)
            (federation,), backend = built.federations, built.in_process
            file = RowFile(Path(folder) / row_file.NAME, federation.first_row)
            state = federation.start(federation.rows(file))
        found = {"clients": clients, "algorithm": algorithm, "partition s": split, "start s": clock.wall}
        found["start GB"] = resident("VmHWM") - before
        schedule = Schedule(clients, config.participation, "fixed", 0)

        fill(state, options.fill, options.cohort)
        rounds, saves = [], []
        with file, matmul_precision(built.precision):
            for t in range(options.rounds + 1):
                with clock.running():
                    play(federation, state, backend, schedule.round(t, federation.training))
                rounds.append((clock.wall, clock.cpu))
                if t in (0, options.rounds):  # the first also writes what `--fill` has left behind
                    with clock.running():
                        checkpoint.save(Path(folder), state, config.flat(), 0.0, records="", computed=[], inputs={})
                    saves.append(clock.wall)
            with clock.running():
                checkpoint.save(Path(folder), state, config.flat(), 0.0, records="", computed=[], inputs={})
            found["unchanged s"] = clock.wall
            with RowFile(file.path, federation.first_row) as again:
                with clock.running():
                    other = federation.start(federation.rows(again))
                    checkpoint.restore(Path(folder), other, config.flat(), print)
                few = replace(schedule.round(0, federation.training), number=state.round)
                few = replace(few, cohort=few.cohort[:5])
                for each in (state, other):
                    play(federation, each, backend, few)
                same = [torch.equal(state.server[name], v) for name, v in other.server.items()]
                assert all([*same, torch.equal(state.sel["w"], other.sel["w"]), state.seen == other.seen])
    walls, cpus = zip(*rounds[1:], strict=True)
    found |= {"round s": statistics.median(walls), "round CPU s": statistics.median(cpus)}
    written = len({k for t in range(1, options.rounds + 1) for k in schedule.round(t, federation.training).cohort})
    found |= {"checkpoint s": saves[-1], "MB": written * file.length / 1e6, "resume s": clock.wall}
    homes = [*((level.device.type, len(level.slots)) for level in state.clients.levels), ("disk", len(file.places))]
    found["rows"] = ", ".join(f"{count:,} {home}" for home, count in homes if count)
    return found


def play(federation: Federation, state: RunState, backend: InProcess, round: Round) -> None:
    now = [Assignment(federation, state, round)]
    (outcome,) = collect(now, backend.train(now, []))
    assert isinstance(outcome, Outcome)


def fill(state: RunState, clients: int, cohort: int) -> None:
    """Give the last clients a row each, as if they had taken part."""
    first, total = len(state.seen) - min(clients, len(state.seen)), len(state.seen)
    for i in range(first, total, cohort):
        ids = list(range(i, min(i + cohort, total)))
        state.clients.save(0, ids, state.clients.uploads(ids), state.clients.memories(ids))
        for k in ids:
            state.seen[k] = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--algorithms", nargs="+", default=["fedavg", "feddc"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fill", type=int, default=0)
    parser.add_argument("--share", type=float, default=client_rows.SHARE)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", help="where checkpoints go [the system's folder for temporary files]")
    options = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS), flush=True)
    for algorithm in options.algorithms:
        first: dict[str, Any] = {}
        for clients in options.clients:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found = pool.apply(measure, (clients, algorithm, options))
            first = first or found
            found["times"], found["CPU times"] = (found[key] / first[key] for key in ("round s", "round CPU s"))
            print("| " + " | ".join(how.format(found[name]) for name, how in COLUMNS.items()) + " |", flush=True)


if __name__ == "__main__":
    main()
