"""One round: cohort, local steps, uploads, screening, the server's step, the clients' memories.

The engine owns everything an algorithm must not see: which clients take part, their batches, chunks of clients
worked on together, the order of sums, the table of last models, and what to do with a client that diverged.
"""

from __future__ import annotations

import statistics
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from fedman.algorithms import Algorithm, Fused, Local, State
from fedman.data.augment import PAD
from fedman.errors import Diverged, UserError
from fedman.execution.cuda_graphs import Graphs, Task
from fedman.execution.device import one_thread_each
from fedman.execution.stacked import Stacked
from fedman.execution.transfer import Fetched, send
from fedman.training.batches import Batches, Samples
from fedman.training.local_steps import Job, train
from fedman.training.randomness import plan
from fedman.training.settings import Training
from fedman.training.state import Federation, put, start, take


@dataclass(frozen=True)
class Drawn:
    """What a chunk of clients draws in a round: the part of a job that does not depend on the state."""

    batches: Batches
    hp: Local
    clients: Tensor  # [S] on the device


@dataclass(frozen=True)
class Work:
    """A job done, or queued on the device."""

    job: Job
    w: Tensor  # [S, P]
    figures: dict[str, Tensor]  # [S] each: the loss, and the MAN term of every layer


@dataclass(frozen=True)
class End:
    """The end of a cohort's local work, before anyone has looked at it."""

    memory: State
    upload: State
    names: list[str]
    figures: Tensor  # [S, figures]: those of the works, and whether the upload is finite


@dataclass(frozen=True)
class Outcome:
    """What a round reports."""

    cohort: list[int]
    quarantined: list[int]  # upload or figures were not finite; the round's result is the one without them
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
        self.device, self.precision = torch.device(device), precision
        self.dtype = torch.float64 if precision == "fp64" else torch.float32
        stacked.accelerate(self.device, precision, samples.shape if samples.images else ())
        self.fused: Fused | None = None
        if stacked.kernels is not None:
            from fedman.kernels import update

            self.fused = update
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
        self._ahead: dict[tuple[int, ...], Drawn] = {}
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(torch.get_num_threads())
        self._map = self._pool.map if self.device.type == "cpu" else map

    def start(self) -> Federation:
        """The state before the first round."""
        w = self.stacked.initial().to(self.device, self.dtype)
        return start(w, self.algorithm, self.share.tolist())

    def everyone(self, state: Federation) -> Tensor:
        """`all`: the mean of all N clients' last models, the model whose accuracy the paper reports."""
        return (state.total / self.share.sum().item()).to(self.dtype)

    def round(self, state: Federation, cohort: list[int]) -> Outcome:
        """Play one round and bring `state` to its end. On `Stopped` or `Diverged` the state is left as it was."""
        end = self.end(state, self.launch(state, cohort))
        return self.settle(state, cohort, end, Fetched(end.figures).values())

    def chunks(self, cohort: list[int]) -> list[list[int]]:
        """The clients worked on together."""
        return [cohort[i : i + self.chunk] for i in range(0, len(cohort), self.chunk)]

    def launch(self, state: Federation, cohort: list[int]) -> list[Work]:
        """The local steps of a cohort; on a GPU they are queued and the host is free."""

        def work(clients: list[int]) -> Work:
            job, stacked = self.job(state, clients), self._model()
            return Work(job, *train(job, stacked, self.graphs, self.stopping))

        while True:
            chunks = self.chunks(cohort)
            with one_thread_each(self.device), suppress(torch.OutOfMemoryError):
                return list(self._map(work, chunks))
            self.make_room(len(chunks[0]))

    def make_room(self, clients: int) -> None:
        """So many clients at once were too many for the device's memory: half of them from now on."""
        if clients == 1:
            raise UserError("chunk: not even one client at a time fits into memory; use a smaller batch_size")
        self.chunk = clients // 2
        if self.graphs is not None:
            self.graphs.clear()
        warnings.warn(f"{clients} clients at once do not fit into memory; going on with {self.chunk}", stacklevel=2)

    def draw(self, t: int, clients: list[int]) -> Drawn:
        """Batches, learning rate and sizes of a chunk of clients in round t (counted from 0)."""
        how, device = self.training, self.device
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
        hp = Local(
            lr=send(how.rate(t), device, self.dtype),
            lr0=how.lr,
            decay=how.weight_decay,
            clip=how.clip,
            p=send(self.relative_size[clients, None].tolist(), device, self.dtype),
            steps=send([[k] for k in drawn.steps], device, self.dtype),
            is_weight=self.is_weight,
            fused=self.fused,
        )
        index = send(clients, device)
        return Drawn(Batches(self.samples, index, drawn, self.dtype, self.stacked.layout), hp, index)

    def draw_ahead(self, t: int, cohort: list[int]) -> None:
        """Draw for a round to come, while the device is busy with the one before it."""
        self._ahead = {(t, *clients): self.draw(t, clients) for clients in self.chunks(cohort)}

    def job(self, state: Federation, clients: list[int]) -> Job:
        """The local work of a chunk of clients in this round."""
        drawn = self._ahead.pop((state.round, *clients), None) or self.draw(state.round, clients)
        memory = {name: take(rows, clients, drawn.clients) for name, rows in state.memory.items()}
        memory |= self.algorithm.begin(state.server, memory, drawn.hp)
        return Job(drawn.batches, state.server, memory, drawn.hp, self.algorithm, self.training.zeta)

    def end(self, state: Federation, works: list[Work]) -> End:
        """What the cohort's local work comes to; nothing waits for the device yet."""
        ends = [self.algorithm.finish(work.w, state.server, work.job.memory, work.job.hp) for work in works]
        memory, upload, figures = (_join(parts) for parts in (*zip(*ends, strict=True), [w.figures for w in works]))
        table = torch.stack(list(figures.values()), 1).double()
        finite = torch.stack([v.isfinite().all(-1) for v in (table, *upload.values())], 1).all(-1, keepdim=True)
        return End(memory, upload, [*figures, "finite"], torch.cat([table, finite.double()], 1))

    def settle(self, state: Federation, cohort: list[int], end: End, figures: list[list[float]]) -> Outcome:
        """Screening, the server's step, the clients' memories. `figures` are those of `end`, on the host."""
        reports = [dict(zip(end.names, row, strict=True)) for row in figures]
        good = [i for i, report in enumerate(reports) if report.pop("finite")]
        if not good:
            raise Diverged(f"round {state.round + 1}: the models of all {len(cohort)} clients are not finite")
        ids = [cohort[i] for i in good]
        clients, share = send(ids, self.device), [self.share[k].item() for k in ids]
        upload, memory = dict(end.upload), dict(end.memory)
        if len(good) < len(cohort):
            rows = send(good, self.device)
            upload, memory = ({name: v[rows] for name, v in part.items()} for part in (upload, memory))
        total = {name: weighted_sum(v, share) for name, v in upload.items()}
        mean = {name: (v / sum(share)).to(self.dtype) for name, v in total.items()}
        state.server = dict(self.algorithm.update(state.server, mean, len(good) / len(self.samples.parts)))
        state.sel = mean["w"]
        state.total += total["w"] - weighted_sum(self.last(state, ids, clients), share)
        self.keep(state, ids, clients, upload["w"], memory)
        for k in ids:
            state.seen[k] = True
        lr = self.training.rate(state.round)
        state.round += 1
        return Outcome(
            cohort=list(cohort),
            quarantined=[k for i, k in enumerate(cohort) if i not in good],
            lr=lr,
            loss=statistics.fmean(reports[i].pop("loss") for i in good),
            man={name: statistics.fmean(reports[i][name] for i in good) for name in reports[good[0]]},
        )

    def last(self, state: Federation, ids: list[int], clients: Tensor) -> Tensor:
        """What these clients uploaded last, `[S, P]`."""
        return take(state.last, ids, clients)

    def keep(self, state: Federation, ids: list[int], clients: Tensor, w: Tensor, memory: State) -> None:
        """Keep what these clients have uploaded now, and their new memories."""
        put(state.last, ids, clients, w)
        for name, rows in memory.items():
            put(state.memory[name], ids, clients, rows)

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

    def scores(self, w: Tensor) -> Tensor:
        """`[2]` on the device: correct answers and summed cross-entropy of one model `[P]` on the test set."""
        if self.graphs is None:
            return self._scores(w)
        carry = {"scores": torch.zeros(2, dtype=torch.float64, device=self.device)}
        task = Task(
            lambda inputs, j, carry: {"scores": self._scores(inputs["test"]["w"])}, {"test": {"w": w}}, carry, 1
        )
        return self.graphs.run(task)["scores"]

    def _scores(self, w: Tensor, batch: int | None = None) -> Tensor:
        n = len(self.samples.y_test)
        batch = batch or (100 if self.device.type == "cpu" else 10_000)

        def part(lo: int) -> Tensor:
            with torch.no_grad():
                return self._model().scores(w, *self._test(lo, lo + batch))

        with one_thread_each(self.device):
            return torch.stack(list(self._map(part, range(0, n, batch)))).sum(0)

    def grade(self, scores: list[float]) -> tuple[float, float]:
        """`scores`, on the host, as accuracy in percent and mean cross-entropy."""
        n = len(self.samples.y_test)
        return 100 * scores[0] / n, scores[1] / n

    def evaluate(self, w: Tensor, batch: int | None = None) -> tuple[float, float]:
        """Accuracy in percent and mean cross-entropy of one model `[P]` on the test set."""
        return self.grade(self._scores(w, batch).tolist())


def _join(parts: Sequence[State]) -> dict[str, Tensor]:
    return {name: torch.cat([p[name] for p in parts]) if len(parts) > 1 else v for name, v in parts[0].items()}


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
    return 1 if device.type == "cpu" and stacked.large else 1024
