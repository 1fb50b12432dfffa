"""The server: an engine whose clients are elsewhere. Rounds, records, checkpoints and resume are the simulator's.

It keeps running sums, not tables of clients: what a client must remember, the client remembers. Replies are screened
before they are used, summed in the clients' order and in float64, and weighted by what the server knows.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message import Array
from flwr.serverapp import Grid
from torch import Tensor

from fedman.assembly import make_engine, on_device
from fedman.config import CUSTOM, Config
from fedman.data import Dataset, is_npz, load
from fedman.engine import Engine, Federation, Outcome
from fedman.errors import Interrupted, TooFew, UserError
from fedman.experiment import Progress, Result, Run, drive, finished_result
from fedman.flower.messages import LAST, LAYER, ROUND, SERVER, Order, Task, encode
from fedman.flower.post import Roster, ask, letter
from fedman.flower.screen import Expected, Refused, digest, distance, outliers, screen
from fedman.flower.service import Service, keep
from fedman.flower.traffic import exchange
from fedman.local import Stopped
from fedman.records import LOCAL, RunFolder
from fedman.runtime import matmul_precision, pick_device, pick_precision, stop_on_signal
from fedman.sampling import batch_counts

Stopping = tuple[threading.Event, list[int]]
"""What ends a run early, and the signal that asked for it: see `stop_on_signal`."""

SLACK = 1.01  # for rounding, on the distance a client can move


@dataclass(frozen=True)
class Report(Outcome):
    """An outcome, and how it came about."""

    refused: dict[str, str]  # client -> why its reply was not used
    attempts: int
    bytes_down: int  # of arrays, to all clients
    bytes_up: int  # of arrays that were used


@dataclass(frozen=True)
class Reply:
    """A reply that passed."""

    arrays: Mapping[str, np.ndarray]
    figures: Mapping[str, float]


class Remote(Engine):
    """Plays rounds with clients on other machines."""

    grid: Grid
    service: Service
    settings: str
    task: str
    roster: Roster

    def connect(self, grid: Grid, config: Config, data: Dataset, service: Service) -> None:
        """Tell the engine where its clients are and what they are told."""
        self.grid, self.service, self.keeps_all = grid, service, service.keep_last
        flat = {k: v for k, v in config.flat().items() if k not in LOCAL}
        if service.sizes is not None or is_npz(config.dataset):
            flat["dataset"] = CUSTOM  # a file here is none of the clients' business
        self.settings = encode(flat)
        self.task = encode(Task(data.shape, data.classes, self.samples.images, data.mean, data.std))
        self.exchange = exchange(self.algorithm)
        self.sizes = self.samples.sizes(range(len(self.samples.parts)))
        self.roster = Roster(grid, self.sizes, service.sizes is not None)
        if not self.stacked.layers:  # known after the first forward pass
            w = self.stacked.initial().to(self.device, self.dtype)
            x, y = self.samples.test(0, 1, self.dtype)
            self.stacked.man_terms(w[None], x[None], y[None], None)
        self.figures = ("loss", *(LAYER + name for name in self.stacked.layers))

    def tables(self, w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """None: tables without columns."""
        return {}, w.new_zeros(len(self.samples.parts), 0)

    def start(self) -> Federation:
        """Round 0 of a new run. The notes hold its name, and by client the last round used and that upload's hash."""
        state = super().start()
        state.notes = {"run": uuid.uuid4().hex, "accepted": {}}
        return state

    def round(self, state: Federation, cohort: list[int]) -> Report:
        """Play one round: ask, screen, ask again where too few replied well, then the server's step."""
        good: dict[int, Reply] = {}
        need = max(1, int(np.ceil(self.service.quorum * len(cohort))))
        down = 0
        for attempt in range(1, self.service.retries + 2):
            missing = [k for k in cohort if k not in good]
            replies, refused, sent = self._attempt(state, missing)
            good |= replies
            down += sent
            theta = state.server["w"].cpu().numpy()
            far = {k: distance(reply.arrays["w"], theta) for k, reply in good.items()}
            for k, reason in outliers(far, self.service.norm_factor).items():
                refused[k] = reason
                del good[k]
            if len(good) >= need:
                return self._close(state, cohort, good, refused, attempt, down)
        why = "; ".join(f"client {k}: {reason}" for k, reason in list(refused.items())[:3])
        raise TooFew(
            f"round {state.round + 1}: {len(good)} good replies from a cohort of {len(cohort)}, {need} are needed, "
            f"after {self.service.retries + 1} attempts; {why}"
        )

    def _attempt(self, state: Federation, clients: list[int]) -> tuple[dict[int, Reply], dict[int, str], int]:
        """Ask these clients once: good replies, reasons of the others, and the bytes that went down."""
        self.roster.refresh(self.stopping)
        vectors = {name: Array(state.server[name].cpu().numpy()) for name in self.exchange.down}
        timeout, seats = self.service.round_timeout, self.roster.seats
        letters = {}
        for k in clients:
            if k in seats:
                order = ConfigRecord(vars(self._order(state, k)))
                records = RecordDict({ROUND: order, SERVER: ArrayRecord(vectors)})
                letters[k] = letter(seats[k], "train", records, timeout)
        answers = ask(self.grid, letters, timeout, self.stopping)
        good: dict[int, Reply] = {}
        refused: dict[int, str] = {}
        for k in clients:
            if k not in letters:
                refused[k] = "not connected"
            elif k not in answers:
                refused[k] = f"no reply within {timeout:g} s"
            else:
                try:
                    good[k] = Reply(*screen(answers[k], self._expected(state, k)))
                except Refused as error:
                    refused[k] = str(error)
        return good, refused, len(letters) * sum(len(v.data) for v in vectors.values())

    def _order(self, state: Federation, k: int) -> Order:
        accepted, _ = self._accepted(state, k)
        return Order(
            state.notes["run"],
            state.round,
            k,
            self.relative_size[k].item(),
            accepted,
            self.service.keep_last,
            self.settings,
            self.task,
        )

    def _accepted(self, state: Federation, k: int) -> tuple[int, str]:
        round, hash = state.notes["accepted"].get(str(k), (-1, ""))
        return round, hash

    def _expected(self, state: Federation, k: int) -> Expected:
        accepted, hash = self._accepted(state, k)
        theta = state.server["w"].cpu().numpy()
        return Expected(
            run=state.notes["run"],
            round=state.round,
            client=k,
            arrays=(*self.exchange.up, *([LAST] if self.service.keep_last and accepted >= 0 else [])),
            size=self.stacked.size,
            dtype=str(theta.dtype),
            figures=self.figures,
            centre={"w": theta},
            bound=self.service.norm_bound or self.reach(state, k),
            last=hash,
        )

    def reach(self, state: Federation, k: int) -> float:
        """How far from θ client k can get with its clipped steps: r ← r + η(C + (λ + α/p)(‖θ‖ + r)), K times."""
        hp, theta, r = self.training, state.server["w"].double().norm().item(), 0.0
        pull = getattr(self.algorithm, "alpha", 0.0) / self.relative_size[k].item()
        lr = hp.lr * hp.lr_decay**state.round
        for _ in range(self._steps(k)):
            r += lr * (hp.clip + (hp.weight_decay + pull) * (theta + r))
        return SLACK * r

    def _steps(self, k: int) -> int:
        return len(batch_counts(self.sizes[k], self.training.epochs, self.training.batch_size))

    def _close(
        self, state: Federation, cohort: list[int], good: dict[int, Reply], refused: dict[int, str], n: int, down: int
    ) -> Report:
        """The server's step on the good replies, in the clients' order."""
        ids = sorted(good)

        def rows(name: str) -> Tensor:
            return torch.stack([torch.from_numpy(good[k].arrays[name]) for k in ids]).to(self.device)

        w = rows("w")
        none = {name: w.new_zeros(1).expand_as(w) for name in self.algorithm.client}
        hp = self.local(state.round, ids, [*map(self._steps, ids)])
        upload = {
            **self.algorithm.finish(w, state.server, none, hp)[1],
            **{name: rows(name) for name in self.exchange.up},
        }
        first = self.stacked.initial().to(self.device, self.dtype)
        last = torch.stack(
            [torch.from_numpy(good[k].arrays[LAST]).to(self.device) if LAST in good[k].arrays else first for k in ids]
        )
        up = sum(v.nbytes for k in ids for v in good[k].arrays.values())
        self.advance(state, ids, upload, last)
        for k in ids:
            state.notes["accepted"][str(k)] = [state.round - 1, digest(good[k].arrays["w"])]
        reports = [{name.removeprefix(LAYER): v for name, v in good[k].figures.items()} for k in ids]
        outcome = self.outcome(state, cohort, ids, reports)
        reasons = {str(k): reason for k, reason in refused.items() if k not in good}
        return Report(**vars(outcome), refused=reasons, attempts=n, bytes_down=down, bytes_up=up)


def serve(
    grid: Grid,
    config: Config,
    service: Service,
    *,
    data: Dataset | None = None,
    out: str | Path,
    resume: bool = False,
    device: str = "auto",
    stopping: Stopping | None = None,
    progress: Progress = lambda record: None,
    warn: Callable[[str], object] = lambda message: None,
) -> Result:
    """Play a run's rounds with the clients on the grid, from its last checkpoint where `resume` is set.

    There is a checkpoint after every round. `stopping` is for callers whose main thread is another.
    """
    if resume and (done := finished_result(config, out)):
        return done
    config = config.model_copy(update={"checkpoint_seconds": 0.0})
    data = data or load(config.dataset, config.data_dir)
    device = pick_device(device)
    precision = pick_precision(config.precision, device)
    parts = None
    if service.sizes is not None:
        if len(service.sizes) != config.clients:
            raise UserError(f"sizes: has {len(service.sizes)} numbers for {config.clients} clients")
        parts = [np.arange(n) for n in service.sizes]
    with ExitStack() as stack:
        stack.enter_context(matmul_precision(precision))
        engine = make_engine(config, data, on_device(data, device), None, device, precision, parts, Remote)
        assert isinstance(engine, Remote)
        engine.connect(grid, config, data, service)
        folder = stack.enter_context(RunFolder(out))
        if stopping is not None:
            engine.stopping, caught = stopping
        else:
            caught = stack.enter_context(stop_on_signal(engine.stopping))
        try:
            engine.roster.wait(service.wait, engine.stopping)
        except Stopped:
            raise Interrupted(caught[0], f"{folder.path}: interrupted before the clients were there") from None
        keep(folder.path, service, resume)
        run = Run(config, engine, folder, resume, precision, progress, warn)
        (result,) = drive([run], caught)
    if isinstance(result, Exception):
        raise result
    return result
