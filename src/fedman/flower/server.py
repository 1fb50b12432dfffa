"""The server: an engine whose clients are elsewhere. Rounds, records, checkpoints and resume are the simulator's.

It keeps running sums, not tables of clients: what a client must remember, the client remembers. Replies are screened
before they are used, summed in the clients' order and in float64, and weighted by what the server knows.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message import Array
from flwr.serverapp import Grid
from torch import Tensor

from fedman.algorithms import State
from fedman.config import CUSTOM, Config
from fedman.data import Dataset, is_npz, load
from fedman.errors import Interrupted, TooFew, UserError
from fedman.execution.device import matmul_precision, pick_device
from fedman.flower.exchange import exchange
from fedman.flower.messages import LAST, LAYER, ROUND, SERVER, Order, Task, encode
from fedman.flower.roster import Roster, ask, letter
from fedman.flower.screen import Expected, Refused, digest, distance, outliers, screen
from fedman.flower.service import Service, keep
from fedman.runs.build import make_engine, on_device
from fedman.runs.experiment import Progress, Result, Run, drive, finished_result
from fedman.runs.folder import RunFolder
from fedman.runs.records import decisive
from fedman.runs.signals import stop_on_signal
from fedman.training.engine import End, Engine, Outcome, Work
from fedman.training.local_steps import Job, Stopped
from fedman.training.randomness import batch_counts
from fedman.training.state import Federation, start

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


@dataclass
class Gathered:
    """What a round has brought so far."""

    good: dict[int, Reply] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    attempts: int = 0
    bytes_down: int = 0


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
        flat = decisive(config.flat())
        if service.sizes is not None or is_npz(config.dataset):
            flat["dataset"] = CUSTOM  # a file here is none of the clients' business
        self.settings = encode(flat)
        self.task = encode(Task(data.shape, data.classes, self.samples.images, data.mean, data.std))
        self.exchange = exchange(self.algorithm)
        self.sizes = self.samples.sizes(range(len(self.samples.parts)))
        self.roster = Roster(grid, self.sizes, service.sizes is not None)
        self.initial = self.stacked.initial().to(self.device, self.dtype)
        if not self.stacked.layers:  # known after the first forward pass
            x, y = self.samples.test(0, 1, self.dtype)
            self.stacked.man_terms(self.initial[None], x[None], y[None], None)
        self.figures = ("loss", *(LAYER + name for name in self.stacked.layers))

    def start(self) -> Federation:
        """Round 0 of a new run. The notes hold its name, and by client the last round used and that upload's hash."""
        state = start(self.initial, self.algorithm, self.share.tolist(), tables=False)
        state.notes = {"run": uuid.uuid4().hex, "accepted": {}}
        return state

    def launch(self, state: Federation, cohort: list[int]) -> list[Work]:
        """The local steps of a cohort, done elsewhere: ask, screen, ask again where too few replied well."""
        got = self.gathered = Gathered()
        need = max(1, math.ceil(self.service.quorum * len(cohort)))
        while got.attempts <= self.service.retries and len(got.good) < need:
            self._attempt(state, [k for k in cohort if k not in got.good], got)
        if len(got.good) < need:
            why = "; ".join(f"client {k}: {reason}" for k, reason in list(got.refused.items())[:3])
            raise TooFew(
                f"round {state.round + 1}: {len(got.good)} good replies from a cohort of {len(cohort)}, {need} are "
                f"needed, after {got.attempts} attempts; {why}"
            )
        return [self._work(state, k, got.good[k]) for k in sorted(got.good)]

    def _attempt(self, state: Federation, clients: list[int], got: Gathered) -> None:
        """Ask these clients once."""
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
        got.attempts += 1
        got.bytes_down += len(letters) * sum(len(v.data) for v in vectors.values())
        got.refused = {k: "not connected" for k in clients if k not in letters}
        got.refused |= {k: f"no reply within {timeout:g} s" for k in letters if k not in answers}
        for k, answer in answers.items():
            try:
                got.good[k] = Reply(*screen(answer, self._expected(state, k)))
            except Refused as error:
                got.refused[k] = str(error)
        theta = state.server["w"].cpu().numpy()
        far = {k: distance(reply.arrays["w"], theta) for k, reply in got.good.items()}
        for k, reason in outliers(far, self.service.norm_factor).items():
            got.refused[k] = reason
            del got.good[k]

    def _work(self, state: Federation, k: int, reply: Reply) -> Work:
        """A reply as a job done; what a client remembers is not here and not needed."""
        drawn, w = self.draw(state.round, [k]), self._vector(reply.arrays["w"])[None]
        memory = {name: w.new_zeros(1).expand_as(w) for name in self.algorithm.client}
        figures = {
            name.removeprefix(LAYER): w.new_full((1,), v, dtype=torch.float64) for name, v in reply.figures.items()
        }
        job = Job(drawn.batches, state.server, memory, drawn.hp, self.algorithm, self.training.zeta)
        return Work(job, w, figures)

    def _vector(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def end(self, state: Federation, works: list[Work]) -> End:
        """The uploads: those that came, and those that follow from them."""
        end, good = super().end(state, works), self.gathered.good
        sent = {n: torch.stack([self._vector(good[k].arrays[n]) for k in sorted(good)]) for n in self.exchange.up}
        return replace(end, upload={**end.upload, **sent})

    def settle(self, state: Federation, cohort: list[int], end: End, figures: list[list[float]]) -> Report:
        """The server's step on the good replies, in the clients' order."""
        got = self.gathered
        outcome = super().settle(state, sorted(got.good), end, figures)
        told = vars(outcome) | {"cohort": list(cohort), "quarantined": [k for k in cohort if k not in got.good]}
        return Report(
            **told,
            refused={str(k): reason for k, reason in got.refused.items() if k not in got.good},
            attempts=got.attempts,
            bytes_down=got.bytes_down,
            bytes_up=sum(v.nbytes for reply in got.good.values() for v in reply.arrays.values()),
        )

    def last(self, state: Federation, ids: list[int], clients: Tensor) -> Tensor:
        """What these clients have uploaded before, as they sent it again; the common start for newcomers."""
        sent = (self.gathered.good[k].arrays.get(LAST) for k in ids)
        return torch.stack([self.initial if v is None else self._vector(v) for v in sent])

    def keep(self, state: Federation, ids: list[int], clients: Tensor, w: Tensor, memory: State) -> None:
        """Note which round of these clients counts, and the hash of what they sent."""
        for k in ids:
            state.notes["accepted"][str(k)] = [state.round, digest(self.gathered.good[k].arrays["w"])]

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
    parts = None
    if service.sizes is not None:
        if len(service.sizes) != config.clients:
            raise UserError(f"sizes: has {len(service.sizes)} numbers for {config.clients} clients")
        parts = [np.arange(n) for n in service.sizes]
    with ExitStack() as stack:
        engine = make_engine(config, data, on_device(data, device), None, device, parts, Remote)
        stack.enter_context(matmul_precision(engine.precision))
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
        run = Run(config, engine, folder, resume, progress, warn)
        (result,) = drive([run], caught)
    if isinstance(result, Exception):
        raise result
    return result
