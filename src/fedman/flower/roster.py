"""Messages to nodes over Flower's grid, their replies, and which node is which client."""

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

POLL_INTERVAL = 0.1  # seconds
QUERY_TIMEOUT = 60.0  # seconds
MAX_UNANSWERED = 3  # queries to a node that does not answer

K = TypeVar("K")
Reply = Message | Exception
"""A reply, or the exception raised when it was unpacked."""


def collect_replies(
    grid: Grid, messages: Mapping[K, Message], timeout: float, stopping: threading.Event
) -> dict[K, Reply]:
    """Send the messages and wait until all replies have arrived or the time is over.

    Replies are pulled one by one, so that one that cannot be unpacked affects its sender only.
    """
    grid.push_messages(list(messages.values()))
    waiting = {message.metadata.message_id: key for key, message in messages.items()}
    replies: dict[K, Reply] = {}
    end = time.monotonic() + timeout
    while waiting and time.monotonic() < end:
        if stopping.is_set():
            raise Stopped
        for message_id in list(waiting):
            try:
                found: list[Reply] = list(grid.pull_messages([message_id]))
            except (httpx.HTTPError, OSError):
                raise  # the SuperLink's fault, not the client's
            except Exception as error:
                found = [error]
            if found:
                replies[waiting.pop(message_id)] = found[0]
        if waiting:
            time.sleep(POLL_INTERVAL)
    return replies


@dataclass
class Roster:
    """Which node is which client.

    A new node is asked for its client number; one that does not answer is asked again, `MAX_UNANSWERED` times in all.
    A client is assigned to the first node that claims to be it, and to another such node once the first has
    disconnected or no longer answers.
    """

    grid: Grid
    sizes: list[int]  # samples of each client
    own_data: bool  # whether clients bring data of their own
    nodes: dict[int, int] = field(default_factory=dict)  # client -> node
    claims: dict[int, int] = field(default_factory=dict)  # node -> client
    refused: dict[int, str] = field(default_factory=dict)  # node -> why it cannot be a client
    unanswered: Counter[int] = field(default_factory=Counter)  # node -> queries without an answer

    def wait(self, seconds: float, stopping: threading.Event) -> None:
        """Wait until every client has a node."""
        end = time.monotonic() + seconds
        while len(self.nodes) < len(self.sizes):
            if stopping.is_set():
                raise Stopped
            left = end - time.monotonic()
            if left <= 0:
                raise TooFew(self._missing(seconds))
            self.refresh(stopping, left)
            self.unanswered.clear()
            time.sleep(min(POLL_INTERVAL, left))

    def refresh(self, stopping: threading.Event, timeout: float | None = None) -> None:
        """Remove nodes that have disconnected and assign clients to new ones."""
        timeout, online = timeout or QUERY_TIMEOUT, set(self.grid.get_node_ids())
        self.nodes = {k: node for k, node in self.nodes.items() if node in online}
        given_up = {node for node, n in self.unanswered.items() if n >= MAX_UNANSWERED}
        new = self._query(sorted(online - {*self.claims, *self.refused, *given_up}), timeout, stopping)
        contested = {self.nodes[k] for k in new.values() if k in self.nodes}
        answering = self._query(sorted(contested), timeout, stopping)
        self.nodes = {k: node for k, node in self.nodes.items() if node not in contested or node in answering}
        self.claims |= new
        for node, k in self.claims.items():
            if node in online and node not in contested:
                self.nodes.setdefault(k, node)

    def _query(self, nodes: list[int], timeout: float, stopping: threading.Event) -> dict[int, int]:
        """The clients these nodes claim to be, by node; why a claim is refused is noted in `refused`."""
        content = RecordDict({ROUND: ConfigRecord()})
        messages = {node: Message(content, node, "query", ttl=timeout) for node in nodes}
        replies = collect_replies(self.grid, messages, timeout, stopping) if messages else {}
        claims: dict[int, int] = {}
        for node in nodes:
            try:
                claims[node] = self._claim(replies.get(node))
            except NoAnswer:
                self.unanswered[node] += 1
            except UserError as error:
                self.refused[node] = str(error)
        return claims

    def _claim(self, reply: Reply | None) -> int:
        """The client number in a reply. Flower's own errors (a node that is down) count as no answer."""
        if reply is None or (isinstance(reply, Message) and reply.has_error() and reply.error.code != REFUSED):
            raise NoAnswer
        if isinstance(reply, Exception):
            raise UserError(f"its answer cannot be read ({type(reply).__name__})")
        if reply.has_error():
            raise UserError(str(reply.error.reason))
        record = reply.content.config_records.get(NODE, ConfigRecord())
        client, samples = record.get("client"), record.get("samples")
        if type(client) is not int or not 0 <= client < len(self.sizes):
            raise UserError(f"client: {client!r} is not one of 0 to {len(self.sizes) - 1}")
        expected = self.sizes[client] if self.own_data else 0
        if samples != expected:
            raise UserError(f"client {client} has {samples!r} samples of its own, the server knows {expected}")
        return client

    def _missing(self, seconds: float) -> str:
        missing = [k for k in range(len(self.sizes)) if k not in self.nodes]
        shown = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
        spare = {n: f"client {k} is node {self.nodes[k]}" for n, k in self.claims.items() if self.nodes.get(k, n) != n}
        why = "".join(f"; node {node}: {reason}" for node, reason in [*self.refused.items(), *spare.items()][:4])
        return f"{len(self.nodes)} of {len(self.sizes)} clients are there after {seconds:g} s; missing: {shown}{why}"


class NoAnswer(Exception):
    """A node has not said which client it is."""
