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
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedman.algorithms import Algorithm, Local, State
from fedman.batches import Batch, Batches, Samples
from fedman.data.augment import PAD
from fedman.errors import Diverged
from fedman.graphs import Graphs, Inputs, Tensors
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
    quarantined: list[int]  # clients whose upload was not finite; the round's result is the one without them
    lr: float
    loss: float  # cross-entropy, the mean over the cohort's local steps
    man: dict[str, float]  # mean square activation by layer, of the clients' final models on their first batch


class Stopped(Exception):
    """The user asked to stop; the state is that of the last finished round."""


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
        stacked.accelerate(self.device, precision, samples.shape)
        self.chunk = chunk or default_chunk(stacked, self.device)
        sizes = torch.tensor(samples.sizes(range(len(samples.parts))), dtype=torch.float64)
        self.relative_size = sizes / sizes.mean()  # p_k
        self.share = self.relative_size if algorithm.weighted else torch.ones_like(sizes)
        self.is_weight = stacked.is_weight().to(self.device)
        self.stopping = threading.Event()
        self.graphs = Graphs() if self.device.type == "cuda" else None
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
        chunks = [cohort[i : i + self.chunk] for i in range(0, len(cohort), self.chunk)]
        with one_thread_each(self.device):
            works = list(self._map(lambda c: self._work(state, c), chunks))
        upload, memory, figures = (_join([getattr(w, f) for w in works]) for f in ("upload", "memory", "figures"))
        figures["finite"] = torch.stack([v.isfinite().all(-1) for v in upload.values()]).all(0)
        values = torch.stack([v.double() for v in figures.values()], 1).tolist()  # a round's one host sync
        reports = [dict(zip(figures, row, strict=True)) for row in values]

        good = [i for i, report in enumerate(reports) if report.pop("finite")]
        if not good:
            raise Diverged(f"round {state.round + 1}: the models of all {len(cohort)} clients are not finite")
        share = [self.share[cohort[i]].item() for i in good]
        mean = {name: weighted_mean(rows, good, share).to(self.dtype) for name, rows in upload.items()}
        fraction = len(good) / len(self.samples.parts)
        state.server = dict(self.algorithm.update(state.server, mean, fraction))
        state.sel = mean["w"]
        for i, weight in zip(good, share, strict=True):
            k = cohort[i]
            state.total.add_(upload["w"][i].double() - state.last[k].double(), alpha=weight)
            state.last[k] = upload["w"][i]
            for name, rows in memory.items():
                state.memory[name][k] = rows[i]
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

    def _work(self, state: Federation, clients: list[int]) -> _Work:
        """The local work of a chunk of clients in one round."""
        stacked, t, device = self._model(), state.round, self.device
        how = self.training
        todo = plan(
            how.seed,
            t,
            clients,
            self.samples.sizes(clients),
            how.epochs,
            how.batch_size,
            device,
            pad=PAD if self.samples.augment else 0,
            longest=None if self.graphs is None else self.samples.longest,
        )
        batches = Batches(self.samples, clients, todo, self.dtype)
        hp = Local(
            lr=torch.tensor(how.lr * how.lr_decay**t, dtype=self.dtype, device=device),
            lr0=how.lr,
            decay=how.weight_decay,
            clip=how.clip,
            p=self.relative_size[clients, None].to(device, self.dtype),
            steps=torch.tensor(todo.steps, dtype=self.dtype, device=device)[:, None],
            is_weight=self.is_weight,
        )
        memory = {name: rows[clients] for name, rows in state.memory.items()}
        carry = self._steps(stacked, batches, state.server, memory, hp)
        new, upload = self.algorithm.finish(carry["w"], state.server, memory, hp)
        figures = {"loss": carry["loss"] / hp.steps[:, 0], **stacked.man_terms(carry["w"], *batches.at(0))}
        return _Work(dict(new), dict(upload), figures)

    def _steps(self, stacked: Stacked, batches: Batches, server: State, memory: State, hp: Local) -> dict[str, Tensor]:
        """K local steps: the final models "w" `[S, P]`, and each client's sum of losses "loss" `[S]`."""
        clients = len(hp.p)
        w = server["w"].expand(clients, -1)
        carry = {"w": w, "loss": w.new_zeros(clients)}
        carry |= {name: w.new_zeros(()).expand_as(w) for name in self.algorithm.scratch}

        def step(inputs: Inputs, j: int | Tensor, carry: Tensors) -> dict[str, Tensor]:
            now, local = batches.over(inputs["batches"]), replace(hp, **inputs["hp"])  # type: ignore[arg-type]
            return self._step(stacked, now.at(j), now.active(j), carry, inputs["server"], inputs["memory"], local)

        inputs = {
            "batches": batches.tensors,
            "server": server,
            "memory": memory,
            "hp": {"lr": hp.lr, "p": hp.p, "steps": hp.steps},
        }
        if self.graphs is not None:
            if self.stopping.is_set():
                raise Stopped
            return self.graphs.run(step, inputs, carry, batches.steps)
        for j in range(batches.steps):
            if self.stopping.is_set():
                raise Stopped
            carry = step(inputs, j, carry)
        return carry

    def _step(
        self,
        stacked: Stacked,
        batch: Batch,
        active: Tensor | None,
        carry: Tensors,
        server: State,
        memory: State,
        hp: Local,
    ) -> dict[str, Tensor]:
        """One local step of a chunk; clients that are not `active` stay where they are."""
        seen: list[Tensor] = []

        def grad(w: Tensor) -> Tensor:
            gradient, ce = stacked.gradient(w, *batch, self.training.zeta)
            seen.append(ce)
            return gradient

        scratch = {name: carry[name] for name in self.algorithm.scratch}
        after = self.algorithm.step(carry["w"], grad, server, {**memory, **scratch}, hp)
        if isinstance(after, tuple):
            after, scratch = after[0], dict(after[1])
        w = after if active is None else after.where(active, carry["w"])
        return {"w": w, "loss": carry["loss"] + seen[0], **scratch}

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
        batch = batch or (500 if self.device.type == "cpu" else 5000)

        def part(lo: int) -> Tensor:
            x, y = self.samples.test(lo, lo + batch, self.dtype)
            with torch.no_grad():
                out = self._model().logits(w, x)
            ce = nn.functional.cross_entropy(out, y, reduction="sum")
            return torch.stack([(out.argmax(-1) == y).sum().double(), ce.double()])

        with one_thread_each(self.device):
            right, ce = torch.stack(list(self._map(part, range(0, n, batch)))).sum(0).tolist()
        return 100 * right / n, ce / n


@dataclass(frozen=True)
class _Work:
    memory: dict[str, Tensor]
    upload: dict[str, Tensor]
    figures: dict[str, Tensor]  # [S] each: the loss, and the MAN term of every layer


def _join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([p[name] for p in parts]) for name in parts[0]}


def weighted_mean(rows: Tensor, which: Sequence[int], weights: Sequence[float]) -> Tensor:
    """Σ weight·row / Σ weight in float64 and in the order given: the same bits for any chunking and device count."""
    total = torch.zeros(rows.shape[-1], dtype=torch.float64, device=rows.device)
    for i, weight in zip(which, weights, strict=True):
        total.add_(rows[i], alpha=weight)
    return total / sum(weights)


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
