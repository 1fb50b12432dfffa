"""One round: cohort, local steps, uploads, screening, the server's step, the clients' memories.

The engine owns everything an algorithm must not see: which clients take part, their batches, chunks of clients
worked on together, the order of sums, the table of last models, and what to do with a client that diverged.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedman.algorithms import Algorithm, Local, State
from fedman.batches import Batches, Samples
from fedman.data.augment import PAD
from fedman.errors import Diverged
from fedman.graphs import Graphs
from fedman.local import Job, stack, train
from fedman.sampling import plan
from fedman.stacked import Stacked


@dataclass(frozen=True)
class Training:
    """How clients train, whatever the algorithm: protocol §4.1."""

    zeta: float = 0.0
    lr: float = 0.1
    lr_decay: float = 0.998
    weight_decay: float = 1e-3
    clip: float = 10.0
    epochs: int = 5
    batch_size: int = 50
    seed: int = 0


@dataclass
class Federation:
    """The state of a run between rounds: all that a checkpoint must hold."""

    round: int  # rounds done
    server: dict[str, Tensor]  # [P] each
    memory: dict[str, Tensor]  # [N, P] each: what the clients keep
    last: Tensor  # [N, P], x_k: everyone's most recent upload, the common start for those never seen
    total: Tensor  # [P] in float64: the sum of `last`, weighted as the uploads are
    sel: Tensor  # [P], the mean upload of the last round
    seen: list[bool] = field(default_factory=list)  # [N], who has taken part
    notes: dict[str, Any] = field(default_factory=dict)  # of an engine of another kind; plain enough for JSON


@dataclass(frozen=True)
class Outcome:
    """What a round reports."""

    cohort: list[int]
    quarantined: list[int]  # clients whose upload was not finite; the round's result is the one without them
    lr: float
    loss: float  # cross-entropy, the mean over the cohort's local steps
    man: dict[str, float]  # mean square activation by layer, of the clients' final models on their first batch


class Engine:
    """Runs rounds of one algorithm on one model and one set of clients."""

    keeps_all = True  # whether `everyone` can be told

    def __init__(
        self,
        stacked: Stacked,
        algorithm: Algorithm,
        samples: Samples,
        training: Training,
        *,
        chunk: int | None = None,
        device: str | torch.device = "cpu",
        precision: str = "fp32",
    ) -> None:
        self.stacked, self.algorithm, self.samples, self.training = stacked, algorithm, samples, training
        self.device, self.dtype = torch.device(device), torch.float64 if precision == "fp64" else torch.float32
        stacked.accelerate(self.device, precision, samples.shape if samples.images else ())
        self.fused = None
        if stacked.kernels is not None:
            from fedman.kernels import clip_update

            self.fused = clip_update
        self.chunk = chunk or default_chunk(stacked, self.device)
        sizes = torch.tensor(samples.sizes(range(len(samples.parts))), dtype=torch.float64)
        self.relative_size = sizes / sizes.mean()  # p_k
        self.share = self.relative_size if algorithm.weighted else torch.ones_like(sizes)
        self.ids: Sequence[int] = range(len(sizes))  # the clients' numbers, from which their draws come
        self.is_weight = stacked.is_weight().to(self.device)
        self.stopping = threading.Event()
        self.graphs = Graphs() if self.device.type == "cuda" else None
        self.longest = samples.longest if self.graphs else None  # plans of one shape, where a graph wants it
        self._prepared: Tensor | None = None
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(torch.get_num_threads())
        self._map = self._pool.map if self.device.type == "cpu" else map

    def start(self) -> Federation:
        """Round 0: every client's last model is the common start, every memory is zero."""
        w = self.stacked.initial().to(self.device, self.dtype)
        memory, last = self.tables(w)
        return Federation(
            round=0,
            server={name: w.clone() if name == "w" else torch.zeros_like(w) for name in self.algorithm.server},
            memory=memory,
            last=last,
            total=w.double() * self.share.sum().item(),
            sel=w,
            seen=[False] * len(last),
        )

    def tables(self, w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """What is kept for every client in round 0: `Federation.memory` and `Federation.last`."""
        clients = len(self.samples.parts)
        return {name: w.new_zeros(clients, len(w)) for name in self.algorithm.client}, w.repeat(clients, 1)

    def everyone(self, state: Federation) -> Tensor:
        """`all`: the mean of all N clients' last models, the model whose accuracy the paper reports."""
        return (state.total / self.share.sum().item()).to(self.dtype)

    def round(self, state: Federation, cohort: list[int]) -> Outcome:
        """Play one round and bring `state` to its end. On `Stopped` or `Diverged` the state is left as it was."""
        chunks = [cohort[i : i + self.chunk] for i in range(0, len(cohort), self.chunk)]

        def work(clients: list[int]) -> Work:
            job, stacked = self.job(state, clients), self._model()
            return Work(job, *train(job, self.algorithm, stacked, self.graphs, self.stopping))

        with one_thread_each(self.device):
            works = list(self._map(work, chunks))
        return self.close(state, cohort, works)

    def job(self, state: Federation, clients: list[int]) -> Job:
        """The local work of a chunk of clients in this round."""
        how, t, device = self.training, state.round, self.device
        drawn = plan(
            how.seed,
            t,
            [self.ids[k] for k in clients],
            self.samples.sizes(clients),
            how.epochs,
            how.batch_size,
            device,
            pad=PAD if self.samples.augment else 0,
            longest=self.longest,
        )
        hp = self.local(t, clients, drawn.steps)
        batches = Batches(self.samples, clients, drawn, self.dtype, self.stacked.layout)
        memory = {name: rows[clients] for name, rows in state.memory.items()}
        return Job(batches, state.server, {**memory, **self.algorithm.begin(state.server, memory, hp)}, hp, how.zeta)

    def local(self, t: int, clients: list[int], steps: list[int]) -> Local:
        """What the local steps of these clients share in round t."""
        how, device = self.training, self.device
        return Local(
            lr=torch.tensor(how.lr * how.lr_decay**t, dtype=self.dtype, device=device),
            lr0=how.lr,
            decay=how.weight_decay,
            clip=how.clip,
            p=self.relative_size[clients, None].to(device, self.dtype),
            steps=torch.tensor(steps, dtype=self.dtype, device=device)[:, None],
            is_weight=self.is_weight,
            fused=self.fused,
        )

    def close(self, state: Federation, cohort: list[int], works: list[Work]) -> Outcome:
        """The end of a round: uploads, screening, the server's step, the clients' memories."""
        ends = [self.algorithm.finish(work.w, state.server, work.job.memory, work.job.hp) for work in works]
        memory, upload, figures = (_join(parts) for parts in (*zip(*ends, strict=True), [w.figures for w in works]))
        figures["finite"] = torch.stack([v.isfinite().all(-1) for v in upload.values()]).all(0)
        values = torch.stack([v.double() for v in figures.values()], 1).tolist()  # a round's one host sync
        reports = [dict(zip(figures, row, strict=True)) for row in values]

        good = [i for i, report in enumerate(reports) if report.pop("finite")]
        if not good:
            raise Diverged(f"round {state.round + 1}: the models of all {len(cohort)} clients are not finite")
        ids, rows = [cohort[i] for i in good], {name: v[good] for name, v in upload.items()}
        self.advance(state, ids, rows, state.last[ids])
        state.last[ids] = rows["w"]
        for name, v in memory.items():
            state.memory[name][ids] = v[good]
        return self.outcome(state, cohort, ids, [reports[i] for i in good])

    def advance(self, state: Federation, ids: list[int], upload: State, last: Tensor) -> None:
        """The server's part of a round: the mean of the uploads `[S, P]` of the clients `ids`, its step, the sums.

        `last` holds what the same clients uploaded before. Wherever clients run, a round ends here.
        """
        share = [self.share[k].item() for k in ids]
        mean = {name: (weighted_sum(v, share) / sum(share)).to(self.dtype) for name, v in upload.items()}
        state.server = dict(self.algorithm.update(state.server, mean, len(ids) / len(self.samples.parts)))
        state.sel = mean["w"]
        state.total += weighted_sum(upload["w"], share) - weighted_sum(last, share)
        for k in ids:
            state.seen[k] = True
        state.round += 1

    def outcome(self, state: Federation, cohort: list[int], ids: list[int], reports: list[dict[str, float]]) -> Outcome:
        """What the round that has just ended reports, from the figures of the clients `ids` that count."""
        return Outcome(
            cohort=list(cohort),
            quarantined=[k for k in cohort if k not in ids],
            lr=self.training.lr * self.training.lr_decay ** (state.round - 1),
            loss=statistics.fmean(report["loss"] for report in reports),
            man={name: statistics.fmean(report[name] for report in reports) for name in reports[0] if name != "loss"},
        )

    def _test(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """A slice of the test set as the model wants it; prepared for the kernels once and kept."""
        if self.stacked.kernels is None:
            return self.samples.test(lo, hi, self.dtype)
        if self._prepared is None:
            x, _ = self.samples.test(0, len(self.samples.y_test), self.dtype)
            self._prepared = self.stacked.kernels.prepare(x.movedim(1, -1))
        return self._prepared[lo:hi], self.samples.y_test[lo:hi]

    def _model(self) -> Stacked:
        """The model; on a CPU this thread's own copy of it."""
        if self.device.type != "cpu":
            return self.stacked
        if not hasattr(self._own, "stacked"):
            self._own.stacked = self.stacked.copy()
        return self._own.stacked

    @torch.no_grad()
    def evaluate(self, w: Tensor, batch: int | None = None) -> tuple[float, float]:
        """Accuracy in percent and mean cross-entropy of one model `[P]` on the test set."""
        n = len(self.samples.y_test)
        batch = batch or (100 if self.device.type == "cpu" else 10_000)

        def part(lo: int) -> Tensor:
            with torch.no_grad():
                return self._model().scores(w, *self._test(lo, lo + batch))

        with one_thread_each(self.device):
            right, ce = torch.stack(list(self._map(part, range(0, n, batch)))).sum(0).tolist()
        return 100 * right / n, ce / n


@dataclass(frozen=True)
class Work:
    """A job done."""

    job: Job
    w: Tensor  # [S, P]
    figures: dict[str, Tensor]  # [S] each: the loss, and the MAN term of every layer


def play(runs: Sequence[tuple[Engine, Federation, list[int]]]) -> list[Outcome | Diverged]:
    """A round of several runs at once, their cohorts stacked into one chunk; a run that diverged says so.

    The runs have the same algorithm, model, data and training, but for ζ, seed and partition.
    """
    first = runs[0][0]
    jobs = [engine.job(state, cohort) for engine, state, cohort in runs]
    with one_thread_each(first.device):
        w, figures = train(stack(jobs), first.algorithm, first.stacked, first.graphs, first.stopping)
    sizes = [len(job) for job in jobs]
    apart = {name: v.split(sizes) for name, v in figures.items()}
    outcomes: list[Outcome | Diverged] = []
    for i, (engine, state, cohort) in enumerate(runs):
        work = Work(jobs[i], w.split(sizes)[i], {name: v[i] for name, v in apart.items()})
        try:
            outcomes.append(engine.close(state, cohort, [work]))
        except Diverged as error:
            outcomes.append(error)
    return outcomes


def _join(parts: Sequence[State]) -> dict[str, Tensor]:
    return {name: torch.cat([p[name] for p in parts]) for name in parts[0]}


def weighted_sum(rows: Tensor, weights: Sequence[float]) -> Tensor:
    """Σ weight·row in float64 and in the order given: the same bits for any chunking and number of cores."""
    total = torch.zeros(rows.shape[-1], dtype=torch.float64, device=rows.device)
    for row, weight in zip(rows, weights, strict=True):
        total.add_(row, alpha=weight)
    return total


def default_chunk(stacked: Stacked, device: torch.device) -> int:
    """How many clients to work on together: on a GPU the whole cohort; on a CPU one client a core.

    Small models are bound by the cost of a call, not of its arithmetic, and gain from stacking on a CPU too.
    A function of the model alone, so that the bits of a result do not depend on the machine or its load.
    """
    return 1 if device.type == "cpu" and stacked.size > 50_000 else 1024


@contextmanager
def one_thread_each(device: torch.device) -> Iterator[None]:
    """On a CPU, parallel work is spread over clients, each on one thread: faster than threads inside a small
    convolution, and the result does not depend on the number of cores."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
