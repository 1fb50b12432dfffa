"""The stacks of a sweep played by processes of their own: one a GPU, one a core, or as tasks of a Ray cluster.

A worker plays one stack of runs and ends. All it says is in its runs' folders: progress is read from there, and after
the death of a worker another one goes on from the checkpoints in them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fedman.data import Dataset, load
from fedman.errors import Diverged, Interrupted, UserError
from fedman.runs.experiment import run_stacked
from fedman.runs.folder import ROUNDS
from fedman.runs.grid import Cell
from fedman.runs.records import Progress
from fedman.runs.signals import stop_on_signal

ATTEMPTS = 4  # processes that are started for one stack, if those before die, until the sweep gives up
POLL_INTERVAL = 0.5  # seconds between two polls of the folders


@dataclass(frozen=True)
class Stack:
    """Runs that are played together, and where."""

    cells: tuple[Cell, ...]
    out: Path

    @property
    def cost(self) -> float:
        return sum(cell.cost for cell in self.cells)

    @property
    def names(self) -> str:
        first, *others = (cell.name for cell in self.cells)
        return f"{first} and {len(others)} more runs" if others else first


def play(
    stack: Stack,
    device: str,
    data: Mapping[tuple[str, str | None], Dataset] | None = None,
    progress: Mapping[str, Progress] | None = None,
    warn: Callable[[str], object] | None = None,
) -> list[str]:
    """Play a stack in this process, each run from its last checkpoint. Returns the warnings that `warn` was not there
    to take, and of runs that diverged."""
    said: list[str] = []
    configs, outs = [cell.config for cell in stack.cells], [stack.out / cell.name for cell in stack.cells]
    source = configs[0].source
    results = run_stacked(
        configs,
        load(*source) if data is None else data[source],
        outs,
        resume=True,
        device=device,
        progress=[(progress or {}).get(cell.name, lambda record: None) for cell in stack.cells],
        warn=warn or said.append,
    )
    ends = zip(stack.cells, results, strict=True)
    return said + [f"{cell.name}: {result}" for cell, result in ends if isinstance(result, Diverged)]


class Workers(ABC):
    """Where stacks can be played at the same time."""

    @property
    @abstractmethod
    def is_free(self) -> bool:
        """Whether another stack can start."""

    @abstractmethod
    def start(self, stack: Stack) -> None:
        """Begin to play a stack."""

    @abstractmethod
    def ended(self, seconds: float) -> list[list[str]]:
        """Wait for at most so long; the warnings of each stack that has ended. What went wrong in one is raised."""

    @abstractmethod
    def stop(self, signum: int) -> None:
        """End all that is under way: each run after its round, with a checkpoint."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the workers held."""


def play_all(
    stacks: Sequence[Stack], workers: Workers, progress: dict[str, Progress], warn: Callable[[str], object]
) -> None:
    """Play all stacks, the longest first. `progress` holds a function for each run, by its name."""
    left = sorted(stacks, key=lambda stack: -stack.cost)
    under_way = 0
    watches = [_Watch(stack.out / cell.name / ROUNDS, progress[cell.name]) for stack in stacks for cell in stack.cells]
    stopping = threading.Event()
    with stop_on_signal(stopping) as caught:
        try:
            while (left or under_way) and not stopping.is_set():
                while left and workers.is_free:
                    workers.start(left.pop(0))
                    under_way += 1
                for warnings in workers.ended(POLL_INTERVAL):
                    under_way -= 1
                    for message in warnings:
                        warn(message)
                for watch in watches:
                    watch.poll()
        except BaseException:
            workers.stop(signal.SIGTERM)
            raise
        else:
            if stopping.is_set():
                workers.stop(caught[0])
                raise Interrupted(caught[0], f"the runs under way are saved in {stacks[0].out}")
        finally:
            workers.close()


class _Watch:
    """Reports the records of a run as they are added to the file in its folder."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self.path, self.progress = path, progress
        self.file, self.seen = self._state()

    def poll(self) -> None:
        file, size = self._state()
        if self.file and (file != self.file or size < self.seen):  # written anew by a run that goes on
            self.seen = size
        self.file = file
        if size == self.seen:
            return
        with open(self.path, "rb") as lines:
            lines.seek(self.seen)
            whole, _, _ = lines.read(size - self.seen).rpartition(b"\n")
        self.seen += len(whole) + bool(whole)
        for line in whole.splitlines():
            if record := _record(line):
                self.progress(record)

    def _state(self) -> tuple[int, int]:
        """Which file it is, and how long."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return 0, 0
        return found.st_ino, found.st_size


def _record(line: bytes) -> Any:
    """A line of the records; None for a fragment, as there are when the file is replaced while it is read."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "round" in found else None


@dataclass
class _Worker:
    """A process that plays a stack."""

    stack: Stack
    place: int
    process: Any
    answer: Connection
    attempts: int  # left, its own included


@dataclass
class Processes(Workers):
    """`count` processes on this machine; on GPUs each has one of the `gpus` to itself, or shares it in turn."""

    count: int
    device: str
    gpus: int = 0
    _running: list[_Worker] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        return len(self._running) < self.count

    def start(self, stack: Stack) -> None:
        taken = {worker.place for worker in self._running}
        self._begin(stack, min(set(range(self.count)) - taken), ATTEMPTS)

    def _begin(self, stack: Stack, place: int, attempts: int) -> None:
        context = multiprocessing.get_context("spawn")
        answer, theirs = context.Pipe(duplex=False)
        threads = max(1, (os.cpu_count() or 1) // self.count)
        gpu = place % self.gpus if self.gpus else None
        process = context.Process(target=_work, args=(stack, self.device, gpu, threads, theirs))
        process.start()
        theirs.close()
        self._running.append(_Worker(stack, place, process, answer, attempts))

    def ended(self, seconds: float) -> list[list[str]]:
        if not self._running:
            time.sleep(seconds)
        ready = wait([worker.answer for worker in self._running], timeout=seconds)
        found = []
        for worker in [worker for worker in self._running if worker.answer in ready]:
            self._running.remove(worker)
            try:
                answer = worker.answer.recv()
            except (EOFError, OSError):
                answer = None
            worker.answer.close()
            worker.process.join()
            if answer is None or isinstance(answer, Interrupted):
                self._replace(worker)
            elif isinstance(answer, Exception):
                raise answer
            else:
                found.append(answer)
        return found

    def _replace(self, worker: _Worker) -> None:
        """Start another process in the place of one that died."""
        if worker.attempts == 1:
            code = worker.process.exitcode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            what = f"{worker.stack.names}: {ATTEMPTS} processes died over it, the last of {how}"
            raise UserError(
                f"{what}{'; is memory short? fewer --workers need less' if code == -signal.SIGKILL else ''}"
            )
        self._begin(worker.stack, worker.place, worker.attempts - 1)

    def stop(self, signum: int) -> None:
        for worker in self._running:
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, signum)
        for worker in self._running:
            with suppress(EOFError, OSError):
                worker.answer.recv_bytes()  # an answer longer than a pipe holds keeps its process until it is read
            worker.process.join()

    def close(self) -> None:
        for worker in self._running:
            worker.answer.close()
        self._running.clear()


def _work(stack: Stack, device: str, gpu: int | None, threads: int, answer: Connection) -> None:
    """What a process does: play the stack, answer with its warnings or with what went wrong."""
    os.setpgid(0, 0)  # Ctrl-C reaches the sweep alone, which tells its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    torch.set_num_threads(threads)
    try:
        answer.send(play(stack, device))
    except Exception as error:
        answer.send(error)


def _end_with_parent() -> None:
    """End at once when the sweep has ended, so that its folders are not locked."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
