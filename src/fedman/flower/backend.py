"""The backend whose clients are on other machines: rounds are sent out over Flower's grid, replies screened.

What a client must remember, the client remembers; here only the round whose reply was used and that upload's hash are
kept. Replies are weighted by what the server knows, never by what a client claims.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import Array
from torch import Tensor

from fedman.algorithms import State
from fedman.errors import TooFew
from fedman.flower.exchange import exchange
from fedman.flower.messages import LAST, ROUND, SERVER, TERM, Order
from fedman.flower.roster import Roster, collect_replies
from fedman.flower.screen import Expected, Refused, Reply, digest, outliers, screen
from fedman.flower.server_options import ServerOptions
from fedman.training.aggregate import Trained, Transfers
from fedman.training.federation import Assignment, Federation
from fedman.training.randomness import batch_counts
from fedman.training.round import Round
from fedman.training.state import Notes

SLACK = 1.01  # for rounding, on the distance a client can move


class AcceptedUploads:
    """What is kept of clients that remember for themselves: by client the last round used, and that upload's hash."""

    def __init__(self) -> None:
        self.run = uuid.uuid4().hex
        self.accepted: dict[int, tuple[int, str]] = {}

    def uploads(self, ids: Sequence[int]) -> None:
        return None

    def memories(self, ids: Sequence[int]) -> dict[str, Tensor]:
        return {}

    def save(self, t: int, ids: Sequence[int], w: Tensor, memory: State) -> None:
        for k, row in zip(ids, w.cpu().numpy(), strict=True):
            self.accepted[k] = t, digest(row)

    def tensors(self, seen: Sequence[int]) -> dict[str, Tensor]:
        return {}

    def notes(self) -> Notes:
        return {"run": self.run, "accepted": {str(k): list(v) for k, v in self.accepted.items()}}

    def restore(self, seen: Sequence[int], tensors: Mapping[str, Tensor], notes: Notes) -> None:
        self.run = str(notes["run"])
        accepted = notes["accepted"]
        assert isinstance(accepted, dict)
        self.accepted = {int(k): (int(t), str(hash)) for k, (t, hash) in accepted.items()}


class FlowerBackend:
    """Plays the rounds of one run with the clients of a roster.

    `settings` and `samples` are what the clients are told of the run; `terms` are the names of its penalty's terms.
    """

    def __init__(
        self,
        federation: Federation,
        store: AcceptedUploads,
        roster: Roster,
        service: ServerOptions,
        *,
        settings: str,
        samples: str,
        terms: Sequence[str],
    ) -> None:
        self.federation, self.store, self.roster, self.service = federation, store, roster, service
        self.settings, self.samples = settings, samples
        self.exchange = exchange(federation.algorithm)
        self.figures = ("loss", *(TERM + name for name in terms))
        how, sizes = federation.training, federation.samples.sizes(range(len(federation.ids)))
        self.steps = [len(batch_counts(n, how.epochs, how.batch_size)) for n in sizes]

    def prepare(self, rounds: Iterable[Sequence[Assignment]]) -> None:
        """Nothing: clients get ready when they are asked."""

    def train(self, now: Sequence[Assignment], upcoming: Sequence[Assignment]) -> list[Trained]:
        """Ask the cohort, screen the replies, ask again where too few replied well."""
        (assignment,) = now
        round, server = assignment.round, assignment.state.server
        good: dict[int, Reply] = {}
        refused: dict[int, str] = {}
        attempts = bytes_down = 0
        need = max(1, math.ceil(self.service.quorum * len(round.cohort)))
        while attempts <= self.service.retries and len(good) < need:
            refused, sent = self._attempt(round, server, good)
            attempts += 1
            bytes_down += sent
        if len(good) < need:
            why = "; ".join(f"client {k}: {reason}" for k, reason in list(refused.items())[:3])
            raise TooFew(
                f"round {round.number + 1}: {len(good)} good replies from a cohort of {len(round.cohort)}, "
                f"{need} are needed, after {attempts} attempts; {why}"
            )
        bytes_up = sum(v.nbytes for reply in good.values() for v in reply.arrays.values())
        transfers = Transfers({str(k): reason for k, reason in refused.items()}, attempts, bytes_down, bytes_up)
        return [self._collect(round, server, good, transfers)]

    def _attempt(self, round: Round, server: State, good: dict[int, Reply]) -> tuple[dict[int, str], int]:
        """Ask once those without a good reply, and add to `good`; why the others are refused, and the bytes sent."""
        self.roster.refresh()
        clients = [k for k in round.cohort if k not in good]
        vectors = {name: Array(server[name].cpu().numpy()) for name in self.exchange.down}
        timeout, nodes = self.service.round_timeout, self.roster.nodes
        theta = server["w"].cpu().numpy()
        asked = {k: self._expected(round, theta, k) for k in clients if k in nodes}
        messages = {}
        for k, expected in asked.items():
            records = RecordDict({ROUND: ConfigRecord(vars(expected.order)), SERVER: ArrayRecord(vectors)})
            messages[k] = Message(records, nodes[k], "train", ttl=timeout)
        answers = collect_replies(self.roster.grid, messages, timeout, self.roster.stopping)
        refused = {k: "not connected" for k in clients if k not in messages}
        refused |= {k: f"no reply within {timeout:g} s" for k in messages if k not in answers}
        for k, answer in answers.items():
            try:
                good[k] = screen(answer, asked[k])
            except Refused as error:
                refused[k] = str(error)
        for k, reason in outliers({k: reply.moved for k, reply in good.items()}, self.service.norm_factor).items():
            refused[k] = reason
            del good[k]
        return refused, len(messages) * sum(len(v.data) for v in vectors.values())

    def _collect(self, round: Round, server: State, good: dict[int, Reply], transfers: Transfers) -> Trained:
        """The good replies in the clients' order: the uploads that came, and those that follow from them."""
        federation, algorithm = self.federation, self.federation.algorithm
        clients = sorted(good)
        used = [good[k] for k in clients]
        sent = {n: torch.stack([self._vector(reply.arrays[n]) for reply in used]) for n in self.exchange.up}
        hp = federation.local(round, clients, [self.steps[k] for k in clients])
        kept = (*algorithm.client, *algorithm.scratch)
        memory = {name: torch.zeros_like(sent["w"]) for name in kept}  # of no influence on what follows
        _, follows = algorithm.finish(sent["w"], server, {**memory, **algorithm.begin(server, memory, hp)}, hp)
        last = [reply.arrays.get(LAST) for reply in used]
        figures = {
            name.removeprefix(TERM): sent["w"].new_tensor([reply.figures[name] for reply in used], dtype=torch.float64)
            for name in self.figures
        }
        return Trained(
            clients=clients,
            upload={**follows, **sent},
            memory={},
            previous=torch.stack([federation.initial if v is None else self._vector(v) for v in last]),
            figures=figures,
            transfers=transfers,
        )

    def _vector(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.federation.device)

    def _expected(self, round: Round, theta: np.ndarray, k: int) -> Expected:
        """Client k's order, and what its reply must be."""
        accepted, hash = self.store.accepted.get(k, (-1, ""))
        federation, keep_last, p = self.federation, self.service.keep_last, self.federation.relative_size[k].item()
        how, norm = federation.training, float(np.linalg.norm(theta.astype(np.float64)))
        decay = how.weight_decay + federation.algorithm.extra_decay(p)
        reach = federation.optimizer.reach(norm, self.steps[k], theta.size, round.lr, how.clip, decay)
        return Expected(
            order=Order(self.store.run, round.number, k, p, accepted, keep_last, self.settings, self.samples),
            arrays=(*self.exchange.up, *([LAST] if keep_last and accepted >= 0 else [])),
            figures=self.figures,
            theta=theta,
            bound=self.service.norm_bound or SLACK * reach,
            last=hash,
        )
