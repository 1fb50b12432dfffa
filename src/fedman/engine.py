"""One round: cohort, local steps, uploads, screening, the server's step, the clients' memories.

The engine owns everything an algorithm must not see: which clients take part, their batches, chunks of clients
worked on together, the order of sums, the table of last models, and what to do with a client that diverged.
"""

from __future__ import annotations

import statistics
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedman.algorithms import Algorithm, Local, State
from fedman.batches import Batches, Samples
from fedman.data.augment import PAD
from fedman.errors import Diverged, UserError
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


@dataclass(frozen=True)
class Outcome:
    """What a round reports."""

    cohort: list[int]
    quarantined: list[
        int
    ]  # clients whose upload or figures were not finite; the round's result is the one without them
    lr: float
    loss: float  # cross-entropy, the mean over the cohort's local steps
    man: dict[str, float]  # mean square activation by layer, of the clients' final models on their first batch


class Engine:
    """Runs rounds of one algorithm on one model and one set of clients."""

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
        clients = len(self.samples.parts)
        return Federation(
            round=0,
            server={name: w.clone() if name == "w" else torch.zeros_like(w) for name in self.algorithm.server},
            memory={name: w.new_zeros(clients, len(w)) for name in self.algorithm.client},
            last=w.repeat(clients, 1),
            total=w.double() * self.share.sum().item(),
            sel=w,
            seen=[False] * clients,
        )

    def everyone(self, state: Federation) -> Tensor:
        """`all`: the mean of all N clients' last models, the model whose accuracy the paper reports."""
        return (state.total / self.share.sum().item()).to(self.dtype)

    def round(self, state: Federation, cohort: list[int]) -> Outcome:
        """Play one round and bring `state` to its end. On `Stopped` or `Diverged` the state is left as it was."""

        def work(clients: list[int]) -> Work:
            job, stacked = self.job(state, clients), self._model()
            return Work(job, *train(job, self.algorithm, stacked, self.graphs, self.stopping))

        while True:
            chunks = [cohort[i : i + self.chunk] for i in range(0, len(cohort), self.chunk)]
            with one_thread_each(self.device), suppress(torch.OutOfMemoryError):
                works = list(self._map(work, chunks))
                break
            self.make_room(len(chunks[0]))
        return self.close(state, cohort, works)

    def make_room(self, clients: int) -> None:
        """So many clients at once were too many for the device's memory: half of them from now on."""
        if clients == 1:
            raise UserError("chunk: not even one client at a time fits into memory; use a smaller batch_size")
        self.chunk = clients // 2
        if self.graphs is not None:
            self.graphs.clear()
        warnings.warn(f"{clients} clients at once do not fit into memory; going on with {self.chunk}", stacklevel=2)

    def job(self, state: Federation, clients: list[int]) -> Job:
        """The local work of a chunk of clients in this round."""
        how, t, device = self.training, state.round, self.device
        drawn = plan(
            how.seed,
            t,
            clients,
            self.samples.sizes(clients),
            how.epochs,
            how.batch_size,
            device,
            pad=PAD if self.samples.augment else 0,
            longest=self.longest,
        )
        hp = Local(
            lr=torch.tensor(how.lr * how.lr_decay**t, dtype=self.dtype, device=device),
            lr0=how.lr,
            decay=how.weight_decay,
            clip=how.clip,
            p=self.relative_size[clients, None].to(device, self.dtype),
            steps=torch.tensor(drawn.steps, dtype=self.dtype, device=device)[:, None],
            is_weight=self.is_weight,
            fused=self.fused,
        )
        batches = Batches(self.samples, clients, drawn, self.dtype, self.stacked.layout)
        memory = {name: rows[clients] for name, rows in state.memory.items()}
        return Job(batches, state.server, {**memory, **self.algorithm.begin(state.server, memory, hp)}, hp, how.zeta)

    def close(self, state: Federation, cohort: list[int], works: list[Work]) -> Outcome:
        """The end of a round: uploads, screening, the server's step, the clients' memories."""
        ends = [self.algorithm.finish(work.w, state.server, work.job.memory, work.job.hp) for work in works]
        memory, upload, figures = (_join(parts) for parts in (*zip(*ends, strict=True), [w.figures for w in works]))
        finite = [v.isfinite().all(-1) for v in upload.values()] + [v.isfinite() for v in figures.values()]
        figures["finite"] = torch.stack(finite).all(0)
        values = torch.stack([v.double() for v in figures.values()], 1).tolist()  # a round's one host sync
        reports = [dict(zip(figures, row, strict=True)) for row in values]

        good = [i for i, report in enumerate(reports) if report.pop("finite")]
        if not good:
            raise Diverged(f"round {state.round + 1}: the models of all {len(cohort)} clients are not finite")
        share = [self.share[cohort[i]].item() for i in good]
        mean = {name: (weighted_sum(v[good], share) / sum(share)).to(self.dtype) for name, v in upload.items()}
        state.server = dict(self.algorithm.update(state.server, mean, len(good) / len(self.samples.parts)))
        state.sel = mean["w"]
        ids = [cohort[i] for i in good]
        state.total += weighted_sum(upload["w"][good], share) - weighted_sum(state.last[ids], share)
        state.last[ids] = upload["w"][good]
        for name, rows in memory.items():
            state.memory[name][ids] = rows[good]
        for k in ids:
            state.seen[k] = True
        lr = self.training.lr * self.training.lr_decay**state.round
        state.round += 1
        return Outcome(
            cohort=list(cohort),
            quarantined=[k for i, k in enumerate(cohort) if i not in good],
            lr=lr,
            loss=statistics.fmean(reports[i].pop("loss") for i in good),
            man={name: statistics.fmean(reports[i][name] for i in good) for name in reports[good[0]]},
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

    The runs have the same algorithm, model, data and training, but for ζ, seed and partition. More clients than a
    chunk may hold are played one half after the other.
    """
    first = runs[0][0]
    if len(runs) == 1:
        try:
            return [first.round(*runs[0][1:])]
        except Diverged as error:
            return [error]
    clients = sum(len(cohort) for _, _, cohort in runs)
    if clients > first.chunk:
        half = len(runs) // 2
        return play(runs[:half]) + play(runs[half:])
    w = None
    with one_thread_each(first.device), suppress(torch.OutOfMemoryError):
        jobs = [engine.job(state, cohort) for engine, state, cohort in runs]
        w, figures = train(stack(jobs), first.algorithm, first.stacked, first.graphs, first.stopping)
    if w is None:
        first.make_room(clients)
        return play(runs)
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
