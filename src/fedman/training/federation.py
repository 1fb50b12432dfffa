"""What stays the same from the first round of a run to the last: clients, algorithm, the way they train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedman.aggregation import Aggregation, Mean
from fedman.algorithms import Algorithm, Fused, Local, State
from fedman.data.augment import PAD
from fedman.execution.base import ImageLayout
from fedman.execution.transfer import send
from fedman.optimizers import LocalOptimizer
from fedman.training.attacks import Attack
from fedman.training.batches import Batches, Samples
from fedman.training.client_rows import ClientRows, RowDisk, as_row
from fedman.training.local_steps import STATE, LocalResult, LocalWork
from fedman.training.randomness import plan
from fedman.training.round import Round
from fedman.training.settings import BUFFERS, Training
from fedman.training.state import ClientStore, RunState, joined

OWN = "model.own"
"""The name of the entries of its model that a client keeps for itself, among its memory: not a number before its first
round."""


@dataclass(frozen=True)
class Draw:
    """What a chunk of clients draws in a round, whatever the state: batches, rates, sizes."""

    batches: Batches
    hp: Local


@dataclass(frozen=True, eq=False)
class Federation:
    """The fixed part of a run. Everything that changes is in a `RunState`."""

    algorithm: Algorithm
    optimizer: LocalOptimizer
    samples: Samples
    training: Training
    initial: Tensor  # [P] on the device of the run: the model all clients start from
    is_weight: Tensor  # [P]: whether an entry belongs to a tensor named "weight"
    relative_size: Tensor  # [N] in float64: p_k, a client's samples over the mean of all clients
    ids: Sequence[int]  # the clients' numbers, from which their draws come
    initial_buffers: Tensor | None = None  # [Q], those of the model all start from; None: it has none
    own: Tensor | None = None  # [P + Q]: entries that a client takes from its own last model; None: all from the server
    longest: int | None = None  # draws have the shape of a client with so many samples; None: of the chunk's largest
    image_layout: ImageLayout | None = None
    fused: Fused | None = None
    aggregation: Aggregation = field(default_factory=Mean)
    attack: Attack = field(default_factory=Attack)
    attackers: frozenset[int] = frozenset()  # the clients that carry it out

    @cached_property
    def initial_model(self) -> Tensor:
        """`[P + Q]`: the parameters and buffers that all clients start from."""
        return joined({"w": self.initial} | self._buffers(self.initial_buffers))

    @cached_property
    def _places(self) -> Tensor:
        """Where the entries are that a client keeps."""
        assert self.own is not None
        return self.own.nonzero()[:, 0]

    @staticmethod
    def _buffers(buffers: Tensor | None) -> dict[str, Tensor]:
        return {} if buffers is None else {BUFFERS: buffers}

    @property
    def device(self) -> torch.device:
        return self.initial.device

    @property
    def dtype(self) -> torch.dtype:
        return self.initial.dtype

    @cached_property
    def share(self) -> list[float]:
        """The weight of each client's upload in the mean."""
        return self.relative_size.tolist() if self.algorithm.weighted else [1.0] * len(self.relative_size)

    @cached_property
    def memory(self) -> dict[str, Tensor]:
        """What a client remembers before its first round: zeros, the optimiser's state where it is kept, and nothing of
        its own entries of the model."""
        memory = {name: torch.zeros_like(self.initial) for name in self.algorithm.client}
        if self.training.keep_optimizer:
            memory |= {STATE + name: v[0] for name, v in self.optimizer.init(self.initial[None]).items()}
        if self.own is not None:
            memory[OWN] = torch.full_like(self.initial_model[self._places], torch.nan)
        return memory

    def finish(self, work: LocalWork, result: LocalResult) -> tuple[State, State]:
        """After the last step: the clients' new memories, and what they upload."""
        carried = dict(result.carried)
        buffers = self._buffers(carried.pop(BUFFERS, None))
        memory, upload = self.algorithm.finish(result.w, work.server, {**work.memory, **carried}, work.hp)
        kept = {name: v for name, v in carried.items() if name in self.memory and name.startswith(STATE)}
        own = {} if self.own is None else {OWN: joined({"w": result.w, **buffers})[:, self._places]}
        return {**memory, **kept, **own}, {**upload, **buffers}

    @property
    def first_row(self) -> dict[str, Tensor]:
        """What is kept of a client that has not taken part yet."""
        return as_row(self.initial_model, self.memory)

    def rows(self, disk: RowDisk | None = None) -> ClientRows:
        """What is kept of the clients before round 0; what does not fit into memory goes to `disk`."""
        return ClientRows(self.first_row, len(self.share), disk)

    def start(self, clients: ClientStore | None = None, keep_all: bool = True) -> RunState:
        """The state before round 0. `clients` is what is kept of them (None: rows in memory); without `keep_all` the
        mean of all clients' last models is not kept."""
        w, models = self.initial, ("w", self.algorithm.cloud)
        buffers = self._buffers(self.initial_buffers)
        server = {name: w.clone() if name in models else torch.zeros_like(w) for name in self.algorithm.server}
        return RunState(
            round=0,
            server=server | buffers,
            clients=clients or self.rows(),
            sel={"w": w, **buffers},
            total=self.initial_model.double() * sum(self.share) if keep_all else None,
            seen=[False] * len(self.share),
        )

    def models(self, state: RunState) -> dict[str, Tensor]:
        """The models `[P + Q]` of a round, each with the buffers that were averaged as it was: `all`, the mean of all N
        clients' last models, where it is kept; `sel`, the mean of the round's uploads; `cloud`, the server's own, with
        the buffers of `sel`: the same tensor where the server's step is to take the mean."""
        sel, own = joined(state.sel), state.server[self.algorithm.cloud]
        cloud = sel if own is state.sel["w"] else joined({**state.server, "w": own})
        models = {"sel": sel, "cloud": cloud}
        if state.total is None:
            return models
        return {"all": (state.total / self._shares).to(self.dtype), **models}

    @cached_property
    def _shares(self) -> float:
        return torch.tensor(self.share, dtype=torch.float64).sum().item()

    def personal_model(self, state: RunState, model: Tensor, k: int) -> Tensor:
        """`[P + Q]`: the model as client k has it, with the entries that it keeps, where they are known here."""
        own = state.clients.memories([k]).get(OWN)
        return model if own is None else self._personal(model, own)[0]

    def _personal(self, model: Tensor, own: Tensor) -> Tensor:
        """A model `[P + Q]` with the clients' own entries in their places, `[S, P + Q]`."""
        models, places = model.expand(len(own), -1), self._places
        return models.index_copy(1, places, own.where(~own.isnan(), models[:, places]))

    def draw(self, round: Round, clients: list[int]) -> Draw:
        """Batches, learning rate and sizes of a chunk of clients."""
        how, device = self.training, self.device
        drawn = plan(
            how.seed,
            round.number,
            [self.ids[k] for k in clients],
            self.samples.sizes(clients),
            how.epochs,
            how.batch_size,
            device,
            pad=PAD if self.samples.augment else 0,
            longest=self.longest,
        )
        batches = Batches(self.samples, clients, drawn, self.dtype, self.image_layout)
        return Draw(batches, self.local(round, clients, drawn.steps))

    def local(self, round: Round, clients: list[int], steps: Sequence[int]) -> Local:
        """What the local steps of these clients share: the learning rate, sizes, numbers of steps."""
        how, device = self.training, self.device
        return Local(
            lr=send(round.lr, device, self.dtype),
            lr0=how.lr,
            decay=how.weight_decay,
            clip=how.clip,
            p=send(self.relative_size[clients, None].tolist(), device, self.dtype),
            steps=send([[k] for k in steps], device, self.dtype),
            is_weight=self.is_weight,
            fused=self.fused,
        )

    def work(self, draw: Draw, server: State, memory: State) -> LocalWork:
        """The local work of the clients of a draw, from the server's vectors and their memories.

        What a client keeps of its model is laid over the server's, before the algorithm sees it.
        """
        vectors, kept = dict(server), dict(memory)
        buffers = vectors.pop(BUFFERS, None)
        if self.own is not None:
            models = self._personal(joined({"w": vectors["w"], **self._buffers(buffers)}), kept.pop(OWN))
            vectors["w"], buffers = models.split([len(self.initial), models.shape[1] - len(self.initial)], 1)
        elif buffers is not None:
            buffers = buffers.expand(len(draw.hp.p), -1)
        kept |= self.algorithm.begin(vectors, kept, draw.hp)
        zeta = self.training.zeta
        return LocalWork(draw.batches, vectors, kept, draw.hp, self.algorithm, self.optimizer, zeta, buffers)


@dataclass(frozen=True)
class Assignment:
    """A round of one run, to be worked on from the run's present state."""

    federation: Federation
    state: RunState
    round: Round
