"""Letters to nodes and their answers, over Flower's grid: who sits where, who answers in time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedman.errors import TooFew, UserError
from fedman.execution.executor import Stopped
from fedman.flower.messages import NODE, REFUSED, ROUND

POLL = 0.1  # seconds between two looks at the letter box
QUESTION_TIMEOUT = 60.0
PATIENCE = 3  # questions without an answer before a node is left alone

K = TypeVar("K")
Answer = Message | Exception
"""A reply, or why what came could not be unpacked."""


def ask(grid: Grid, letters: Mapping[K, Message], timeout: float, stopping: threading.Event) -> dict[K, Answer]:
    """Send the letters and wait for answers until all are there or the time is over.

    Answers are fetched one by one: one that cannot be unpacked is its sender's fault alone.
    """
    grid.push_messages(list(letters.values()))
    waiting = {letter.metadata.message_id: key for key, letter in letters.items()}
    answers: dict[K, Answer] = {}
    end = time.monotonic() + timeout
    while waiting and time.monotonic() < end:
        if stopping.is_set():
            raise Stopped
        for number in list(waiting):
            try:
                found: list[Answer] = list(grid.pull_messages([number]))
            except (httpx.HTTPError, OSError):
                raise  # the SuperLink's fault, not the client's
            except Exception as error:
                found = [error]
            if found:
                answers[waiting.pop(number)] = found[0]
        if waiting:
            time.sleep(POLL)
    return answers


def letter(node: int, kind: str, records: RecordDict, timeout: float) -> Message:
    """A message that nobody works on once its answer is no longer waited for."""
    return Message(records, node, kind, ttl=timeout)


@dataclass
class Roster:
    """Which node is which client.

    A node is asked who it is when it comes; who stays silent is asked again, but not for ever. A client's seat goes to
    the first node that claims it, and to another one that does when the first is gone or no longer answers.
    """

    grid: Grid
    sizes: list[int]  # samples of each client
    own: bool  # whether clients have data of their own
    seats: dict[int, int] = field(default_factory=dict)  # client -> node
    claims: dict[int, int] = field(default_factory=dict)  # node -> client
    turned_away: dict[int, str] = field(default_factory=dict)  # node -> why it cannot be a client
    silent: Counter[int] = field(default_factory=Counter)  # node -> questions without an answer

    def wait(self, seconds: float, stopping: threading.Event) -> None:
        """Wait until every client has a node."""
        end = time.monotonic() + seconds
        while len(self.seats) < len(self.sizes):
            if stopping.is_set():
                raise Stopped
            left = end - time.monotonic()
            if left <= 0:
                raise TooFew(self._missing(seconds))
            self.refresh(stopping, left)
            self.silent.clear()
            time.sleep(min(POLL, left))

    def refresh(self, stopping: threading.Event, timeout: float | None = None) -> None:
        """Seat the nodes that have come; free the seats of those that have gone."""
        timeout, online = timeout or QUESTION_TIMEOUT, set(self.grid.get_node_ids())
        self.seats = {k: node for k, node in self.seats.items() if node in online}
        known = {*self.claims, *self.turned_away, *(node for node, n in self.silent.items() if n >= PATIENCE)}
        new = self._ask(sorted(online - known), timeout, stopping)
        held = {self.seats[k] for k in new.values() if k in self.seats}
        answering = self._ask(sorted(held), timeout, stopping)
        self.seats = {k: node for k, node in self.seats.items() if node not in held or node in answering}
        self.claims |= new
        for node, k in self.claims.items():
            if node in online and node not in held:
                self.seats.setdefault(k, node)

    def _ask(self, nodes: list[int], timeout: float, stopping: threading.Event) -> dict[int, int]:
        """The clients these nodes say they are; a claim that does not fit is noted."""
        question = RecordDict({ROUND: ConfigRecord()})
        letters = {node: letter(node, "query", question, timeout) for node in nodes}
        answers = ask(self.grid, letters, timeout, stopping) if letters else {}
        claims: dict[int, int] = {}
        for node in nodes:
            try:
                claims[node] = self._claim(answers.get(node))
            except NoAnswer:
                self.silent[node] += 1
            except UserError as error:
                self.turned_away[node] = str(error)
        return claims

    def _claim(self, answer: Answer | None) -> int:
        """The client in an answer. Flower's own errors (a node that is down) are no answer."""
        if answer is None or (isinstance(answer, Message) and answer.has_error() and answer.error.code != REFUSED):
            raise NoAnswer
        if isinstance(answer, Exception):
            raise UserError(f"its answer cannot be read ({type(answer).__name__})")
        if answer.has_error():
            raise UserError(str(answer.error.reason))
        record = answer.content.config_records.get(NODE, ConfigRecord())
        client, samples = record.get("client"), record.get("samples")
        if type(client) is not int or not 0 <= client < len(self.sizes):
            raise UserError(f"client: {client!r} is not one of 0 to {len(self.sizes) - 1}")
        wanted = self.sizes[client] if self.own else 0
        if samples != wanted:
            raise UserError(f"client {client} has {samples!r} samples of its own, the server knows {wanted}")
        return client

    def _missing(self, seconds: float) -> str:
        missing = [k for k in range(len(self.sizes)) if k not in self.seats]
        shown = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
        spare = {n: f"client {k} is node {self.seats[k]}" for n, k in self.claims.items() if self.seats.get(k, n) != n}
        why = "".join(f"; node {node}: {reason}" for node, reason in [*self.turned_away.items(), *spare.items()][:4])
        return f"{len(self.seats)} of {len(self.sizes)} clients are there after {seconds:g} s; missing: {shown}{why}"


class NoAnswer(Exception):
    """A node has not said who it is."""
