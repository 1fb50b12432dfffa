"""The backend whose clients are on other machines: rounds are sent out over Flower's grid, replies screened.

What a client must remember, the client remembers (`fedman.flower.accepted_uploads` is what is kept here). Replies are
weighted by what the server knows, never by what a client claims.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from fedman.algorithms import State
from fedman.errors import TooFew
from fedman.execution.executor import Stopped
from fedman.flower.accepted_uploads import AcceptedUploads
from fedman.flower.exchange import exchange
from fedman.flower.incoming_reply import largest_reply
from fedman.flower.messages import FORGOTTEN, ROUND, SERVER, TERM, Order
from fedman.flower.replies import POLL_INTERVAL, PendingReplies
from fedman.flower.roster import QUERY_TIMEOUT, Roster
from fedman.flower.screen import Expected, Refused, Reply, outliers, screen
from fedman.flower.server_options import ServerOptions
from fedman.training.aggregate import Trained, Transfers
from fedman.training.federation import Assignment, Federation
from fedman.training.randomness import batch_counts
from fedman.training.round import Round
from fedman.training.settings import BUFFERS

SLACK = 1.01  # for rounding, on the distance a client can move
NAMED = 10  # refused nodes in a round's record


def replies_needed(cohort: int, quorum: float) -> int:
    """How many of a cohort are this share of it: 55 of 100 for 0.55, although 0.55·100 > 55 in floating point."""
    return next(n for n in range(1, cohort + 1) if n / cohort >= quorum)


class FlowerBackend:
    """Plays the rounds of one run with the clients of a roster.

    `settings` and `samples` are what the clients are told of the run; `terms` are the names of its penalty's terms,
    `variances` the entries of the model's buffers that are some.
    """

    queues = False  # `train` waits for the clients, also where the server has a GPU

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
        variances: Tensor,
    ) -> None:
        self.federation, self.store, self.roster, self.service = federation, store, roster, service
        self.settings, self.samples, self.variances = settings, samples, variances.numpy()
        buffers, own = federation.initial_buffers, federation.own
        self.exchange = exchange(federation.algorithm, buffers is not None, own is not None)
        self.own = None if own is None else own[: len(federation.initial)].cpu().numpy()
        self.keys: dict[int, str] = {}  # of the nodes whose replies were good
        self.named: set[int] = set()  # refused nodes that stand in a record
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
        need = replies_needed(len(round.cohort), self.service.quorum)
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
        if self.service.bind_keys:
            for k in good:
                self.store.keys.setdefault(k, self.keys[k])
        transfers = Transfers(
            refused={str(k): reason for k, reason in refused.items()} | self._refused_nodes(),
            attempts=attempts,
            bytes_down=bytes_down,
            bytes_up=sum(v.nbytes for reply in good.values() for v in reply.arrays.values()),
            restarted=[k for k in sorted(good) if k in self.store.forgotten],
        )
        return [self._collect(round, server, good, transfers)]

    def _refused_nodes(self) -> dict[str, str]:
        """The nodes that have been refused as clients since the last round, with the reasons."""
        new = [node for node in self.roster.refused if node not in self.named]
        self.named.update(new)
        more = {"more nodes": f"{len(new) - NAMED} were refused as well"} if len(new) > NAMED else {}
        return {f"node {node}": self.roster.refused[node] for node in new[:NAMED]} | more

    def _attempt(self, round: Round, server: State, good: dict[int, Reply]) -> tuple[dict[int, str], int]:
        """Ask once those without a good reply, and add to `good`; why the others are refused, and the bytes sent."""
        clients = [k for k in round.cohort if k not in good]
        timeout, theta = self.service.round_timeout, server["w"].cpu().numpy()
        vectors = {name: Array(server[name].cpu().numpy()) for name in self.exchange.down}
        buffers = server[BUFFERS].cpu().numpy() if BUFFERS in server else None
        expected = {k: self._expected(round, theta, buffers, k) for k in clients}
        answers, keys = self._ask(expected, vectors)
        refused = {k: "not connected" for k in clients if k not in keys}
        refused |= {k: f"no reply within {timeout:g} s" for k in keys if k not in answers}
        for k, answer in answers.items():
            try:
                good[k] = screen(answer, expected[k])
                self.keys[k] = keys[k]
            except Refused as error:
                refused[k] = str(error)
                if answer.has_error() and answer.error.code == FORGOTTEN:
                    self.store.forgotten.add(k)
                    refused[k] += "; it starts without a memory when it is asked again"
        factor = self.service.norm_factor
        far = outliers({k: reply.shifted for k, reply in good.items()}, factor, BUFFERS)
        far |= outliers({k: reply.moved for k, reply in good.items()}, factor)
        for k, reason in far.items():
            refused[k] = reason
            del good[k]
        return refused, len(keys) * sum(len(v.data) for v in vectors.values())

    def _ask(
        self, expected: Mapping[int, Expected], vectors: Mapping[str, Array]
    ) -> tuple[dict[int, Message], dict[int, str]]:
        """The answers of these clients, and the keys of the nodes that were asked.

        A client whose node is not known yet is asked as soon as it is; the round does not wait for nodes that are none
        of its clients, nor for ever for new ones: time enough for one to answer, and for the one whose place it takes.
        """
        roster, timeout, start = self.roster, self.service.round_timeout, time.monotonic()
        pending = PendingReplies(roster.grid, largest_reply(next(iter(expected.values())).sizes))
        answers: dict[int, Message] = {}
        keys: dict[int, str] = {}
        ends: dict[int, float] = {}
        while True:
            if roster.stopping.is_set():
                raise Stopped
            if len(keys) < len(expected):
                roster.refresh()
                found = {k: roster.nodes[k] for k in expected if k not in keys and roster.is_settled(k)}
                messages = {}
                for k, node in found.items():
                    order = ConfigRecord(vars(expected[k].order))
                    records = RecordDict({ROUND: order, SERVER: ArrayRecord({**vectors})})
                    messages[k] = Message(records, node, "train", ttl=timeout)
                pending.send(messages)
                keys |= {k: roster.key_of[node] for k, node in found.items()}
                ends |= dict.fromkeys(found, time.monotonic() + timeout)
            answers |= pending.arrived()
            now = time.monotonic()
            hope = len(keys) < len(expected) and roster.hopeful and now < start + 2 * QUERY_TIMEOUT
            if not hope and all(now >= ends[k] for k in pending.waiting):
                return answers, keys
            time.sleep(POLL_INTERVAL)

    def _collect(self, round: Round, server: State, good: dict[int, Reply], transfers: Transfers) -> Trained:
        """The good replies in the clients' order: the uploads that came, and those that follow from them."""
        federation, algorithm = self.federation, self.federation.algorithm
        clients = sorted(good)
        used = [good[k] for k in clients]
        sent = {n: torch.stack([self._vector(reply.arrays[n]) for reply in used]) for n in self.exchange.up}
        hp = federation.local(round, clients, [self.steps[k] for k in clients])
        kept = (*algorithm.client, *algorithm.scratch)
        server = {name: v for name, v in server.items() if name != BUFFERS}
        memory = {name: torch.zeros_like(sent["w"]) for name in kept}  # of no influence on what follows
        _, follows = algorithm.finish(sent["w"], server, {**memory, **algorithm.begin(server, memory, hp)}, hp)
        figures = {
            name.removeprefix(TERM): sent["w"].new_tensor([reply.figures[name] for reply in used], dtype=torch.float64)
            for name in self.figures
        }
        return Trained(
            clients=clients,
            upload={**follows, **sent},
            memory={},
            previous=self.store.uploads(clients),
            figures=figures,
            transfers=transfers,
        )

    def _vector(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.federation.device)

    def _expected(self, round: Round, theta: np.ndarray, buffers: np.ndarray | None, k: int) -> Expected:
        """Client k's order, and what its reply must be."""
        federation, p = self.federation, self.federation.relative_size[k].item()
        how, norm = federation.training, float(np.linalg.norm(theta.astype(np.float64)))
        decay = how.weight_decay + federation.algorithm.extra_decay(p)
        reach = federation.optimizer.reach(norm, self.steps[k], theta.size, round.lr, how.clip, decay)
        return Expected(
            order=Order(self.store.run, round.number, k, p, self.store.remembered(k), self.settings, self.samples),
            arrays=tuple(name for name in self.exchange.up if name != BUFFERS),
            figures=self.figures,
            theta=theta,
            bound=self.service.norm_bound or SLACK * reach,
            norm=self.service.norm_bound
            or SLACK * federation.algorithm.upload_norm(reach, self.steps[k] * (round.number + 1)),
            buffers=buffers,
            variances=None if buffers is None else self.variances,
            own=self.own,
        )
