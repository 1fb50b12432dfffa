"""One round: cohort, local steps, uploads, screening, the server's step, the clients' memories.

The engine owns everything an algorithm must not see: which clients take part, their batches, chunks of clients
worked on together, the order of sums, the table of last models, and what to do with a client that diverged.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedman.algorithms import Algorithm, Local, State
from fedman.data.augment import PAD, Windows, channels_first, normalise
from fedman.errors import Diverged
from fedman.sampling import Plan, plan
from fedman.stacked import Stacked


@dataclass(frozen=True)
class Samples:
    """Training and test samples on the device, and which training samples are whose."""

    x: Tensor  # bytes [n, H, W, C], or a user's own numbers [n, ...]
    y: Tensor  # [n]
    x_test: Tensor
    y_test: Tensor
    parts: list[Tensor]  # the indices of each client's samples
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool

    @property
    def images(self) -> bool:
        """Whether samples are bytes of images, channels last."""
        return self.x.dtype == torch.uint8

    def sizes(self, clients: Sequence[int]) -> list[int]:
        return [len(self.parts[k]) for k in clients]

    def of(self, clients: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Normalised samples `[S, n, ...]` and labels `[S, n]`, the shorter clients padded."""
        index = nn.utils.rnn.pad_sequence([self.parts[k] for k in clients], batch_first=True)
        return normalise(self.x[index], self.mean, self.std, dtype), self.y[index]

    def test(self, lo: int, hi: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A slice of the normalised test set, images with their channels first."""
        x = normalise(self.x_test[lo:hi], self.mean, self.std, dtype)
        return channels_first(x) if self.images else x, self.y_test[lo:hi]


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


Batch = tuple[Tensor, Tensor, Tensor | None]
"""Inputs `[S, B, ...]`, labels `[S, B]`, and the samples' shares in their batch's mean (None: equal)."""


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
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.stacked, self.algorithm, self.samples, self.training = stacked, algorithm, samples, training
        self.device, self.dtype = torch.device(device), dtype
        self.chunk = chunk or default_chunk(stacked, self.device)
        sizes = torch.tensor(samples.sizes(range(len(samples.parts))), dtype=torch.float64)
        self.relative_size = sizes / sizes.mean()  # p_k
        self.share = self.relative_size if algorithm.weighted else torch.ones_like(sizes)
        self.is_weight = stacked.is_weight().to(self.device)
        self.stopping = threading.Event()
        workers = torch.get_num_threads() if self.device.type == "cpu" else 1
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(workers)

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
            works = list(self._pool.map(lambda c: self._work(state, c), chunks))
        upload, memory = (_join([getattr(w, name) for w in works]) for name in ("upload", "memory"))
        losses, terms = torch.cat([w.loss for w in works]), _join([w.terms for w in works])

        finite = torch.stack([v.isfinite().all(-1) for v in upload.values()]).all(0).tolist()
        good = [i for i, ok in enumerate(finite) if ok]
        lost = [k for k, ok in zip(cohort, finite, strict=True) if not ok]
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
            quarantined=lost,
            lr=lr,
            loss=losses[good].double().mean().item(),
            man={name: values[good].double().mean().item() for name, values in terms.items()},
        )

    def _work(self, state: Federation, clients: list[int]) -> _Work:
        """The local work of a chunk of clients in one round."""
        stacked, t, device = self._model(), state.round, self.device
        x, y = self.samples.of(clients, self.dtype)
        todo = plan(
            self.training.seed,
            t,
            clients,
            self.samples.sizes(clients),
            self.training.epochs,
            self.training.batch_size,
            device,
            pad=PAD if self.samples.augment else 0,
        )
        hp = Local(
            lr=torch.tensor(self.training.lr * self.training.lr_decay**t, dtype=self.dtype, device=device),
            lr0=self.training.lr,
            decay=self.training.weight_decay,
            clip=self.training.clip,
            p=self.relative_size[clients, None].to(device, self.dtype),
            steps=torch.tensor(todo.steps, dtype=self.dtype, device=device)[:, None],
            is_weight=self.is_weight,
        )
        batches = Batches(Windows(x, self.samples.images, self.samples.augment), y, todo, self.dtype)
        memory = {name: rows[clients] for name, rows in state.memory.items()}
        w, loss = self._steps(stacked, batches, state.server, memory, hp)
        new, upload = self.algorithm.finish(w, state.server, memory, hp)
        terms = stacked.man_terms(w, *batches.at(0))
        return _Work(dict(new), dict(upload), loss / hp.steps[:, 0], terms)

    def _steps(
        self, stacked: Stacked, batches: Batches, server: State, memory: State, hp: Local
    ) -> tuple[Tensor, Tensor]:
        """K local steps: the final models `[S, P]`, and each client's sum of losses `[S]`."""
        zeta, clients = self.training.zeta, len(hp.p)
        w = server["w"].expand(clients, -1)
        scratch: State = {name: w.new_zeros(()).expand_as(w) for name in self.algorithm.scratch}
        loss = w.new_zeros(clients)
        for j in range(batches.steps):
            if self.stopping.is_set():
                raise Stopped
            batch = batches.at(j)
            seen: list[Tensor] = []

            def grad(w: Tensor, batch: Batch = batch, seen: list[Tensor] = seen) -> Tensor:
                gradient, ce = stacked.gradient(w, *batch, zeta)
                seen.append(ce)
                return gradient

            after = self.algorithm.step(w, grad, server, {**memory, **scratch}, hp)
            if isinstance(after, tuple):
                after, scratch = after
            w = after if batches.active is None else after.where(batches.active[:, j, None], w)
            loss = loss + seen[0]
        return w, loss

    def _model(self) -> Stacked:
        """This thread's own copy of the model."""
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
            right, ce = torch.stack(list(self._pool.map(part, range(0, n, batch)))).sum(0).tolist()
        return 100 * right / n, ce / n


@dataclass(frozen=True)
class Batches:
    """The batches of a chunk of clients, step by step."""

    windows: Windows
    y: Tensor
    plan: Plan
    dtype: torch.dtype

    @property
    def steps(self) -> int:
        return self.plan.sample.shape[1]

    @property
    def active(self) -> Tensor | None:
        """`[S, K]`: whether a client still has a step to take; None when all take the same number."""
        if len(set(self.plan.steps)) == 1:
            return None
        return torch.tensor(self.plan.counts, device=self.y.device) > 0

    def at(self, j: int) -> Batch:
        """Step j."""
        sample, window = self.plan.sample[:, j], self.plan.window[:, :, j]
        weight = self.plan.weight
        if weight is not None:
            weight = weight[:, j].to(self.dtype)
            if len(sample) == 1:  # one client alone needs no padding
                n = self.plan.counts[0][j]
                sample, window, weight = sample[:, :n], window[:, :, :n], None
        return self.windows.take(sample, window), self.y.gather(1, sample), weight


@dataclass(frozen=True)
class _Work:
    memory: dict[str, Tensor]
    upload: dict[str, Tensor]
    loss: Tensor
    terms: dict[str, Tensor]


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
