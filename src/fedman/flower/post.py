"""Letters to nodes and their answers, over Flower's grid: who sits where, who answers in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedman.errors import TooFew
from fedman.flower.messages import NODE, ROUND
from fedman.local import Stopped

POLL = 0.1  # seconds between two looks at the letter box
QUESTION_TIMEOUT = 60.0

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
    """Which node is which client. A node is asked once; a client's seat goes to another node when its own is gone."""

    grid: Grid
    sizes: list[int]  # samples of each client
    own: bool  # whether clients have data of their own
    seats: dict[int, int] = field(default_factory=dict)  # client -> node
    turned_away: dict[int, str] = field(default_factory=dict)  # node -> reason

    def wait(self, seconds: float, stopping: threading.Event) -> None:
        """Wait until every client has a node."""
        end = time.monotonic() + seconds
        while True:
            self.refresh(stopping)
            if len(self.seats) == len(self.sizes):
                return
            if time.monotonic() >= end:
                break
            time.sleep(min(1.0, seconds))
        missing = [k for k in range(len(self.sizes)) if k not in self.seats]
        shown = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
        why = "".join(f"; node {node}: {reason}" for node, reason in list(self.turned_away.items())[:3])
        raise TooFew(
            f"{len(self.seats)} of {len(self.sizes)} clients are there after {seconds:g} s; missing: {shown}{why}"
        )

    def refresh(self, stopping: threading.Event) -> None:
        """Seat the nodes that have come; free the seats of those that have gone."""
        online = set(self.grid.get_node_ids())
        self.seats = {k: node for k, node in self.seats.items() if node in online}
        new = sorted(online - set(self.seats.values()) - set(self.turned_away))
        claims = self._ask(new, stopping)
        held = {k: self.seats[k] for k in {claims[node] for node in new if node in claims} if k in self.seats}
        alive = self._ask(sorted(held.values()), stopping) if held else {}
        for node in new:
            if node not in claims:
                continue
            k = claims[node]
            if k in self.seats and (k not in held or self.seats[k] in alive):
                self.turned_away[node] = f"claims to be client {k}, who is node {self.seats[k]}"
            else:
                self.seats[k] = node
                held.pop(k, None)

    def _ask(self, nodes: list[int], stopping: threading.Event) -> dict[int, int]:
        """The clients these nodes say they are; a claim that does not fit is noted."""
        letters = {node: letter(node, "query", RecordDict({ROUND: ConfigRecord()}), QUESTION_TIMEOUT) for node in nodes}
        claims: dict[int, int] = {}
        for node, answer in ask(self.grid, letters, QUESTION_TIMEOUT, stopping).items():
            claim, reason = self._claim(answer)
            if claim is None:
                self.turned_away[node] = reason
            else:
                claims[node] = claim
        return claims

    def _claim(self, answer: Answer) -> tuple[int | None, str]:
        if isinstance(answer, Exception):
            return None, f"its answer cannot be read ({type(answer).__name__})"
        if answer.has_error():
            return None, str(answer.error.reason)
        record = answer.content.config_records.get(NODE, ConfigRecord())
        client, samples = record.get("client"), record.get("samples")
        if type(client) is not int or not 0 <= client < len(self.sizes):
            return None, f"client: {client!r} is not one of 0 to {len(self.sizes) - 1}"
        wanted = self.sizes[client] if self.own else 0
        if samples != wanted:
            return None, f"client {client} has {samples!r} samples of its own, the server knows {wanted}"
        return client, ""
