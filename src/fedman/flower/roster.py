"""Messages to nodes over Flower's grid, their replies, and which node is which client."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from fedman.errors import TooFew
from fedman.execution.executor import Stopped
from fedman.flower.messages import NODE, REFUSED, ROUND, UNREADABLE
from fedman.flower.screen import Refused, contents

POLL_INTERVAL = 0.1  # seconds
QUERY_TIMEOUT = 60.0  # seconds
MAX_UNANSWERED = 3  # queries to a node that does not answer


def collect_replies(
    grid: Grid, messages: Mapping[int, Message], timeout: float, stopping: threading.Event
) -> dict[int, Message]:
    """Send the messages and wait until all replies have arrived or the time is over.

    Replies are pulled one by one, so that one that cannot be unpacked affects its sender only: it becomes an error.
    """
    grid.push_messages(list(messages.values()))
    waiting = {message.metadata.message_id: key for key, message in messages.items()}
    replies: dict[int, Message] = {}
    end = time.monotonic() + timeout
    while waiting and time.monotonic() < end:
        if stopping.is_set():
            raise Stopped
        for message_id, key in list(waiting.items()):
            try:
                found = list(grid.pull_messages([message_id]))
            except (httpx.HTTPError, OSError):
                raise  # the SuperLink's fault, not the client's
            except Exception as error:
                reason = f"its reply cannot be read ({type(error).__name__})"
                found = [Message(Error(UNREADABLE, reason), reply_to=messages[key])]
            if found:
                replies[key] = found[0]
                del waiting[message_id]
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
    stopping: threading.Event
    nodes: dict[int, int] = field(default_factory=dict)  # client -> node
    claims: dict[int, int] = field(default_factory=dict)  # node -> client
    refused: dict[int, str] = field(default_factory=dict)  # node -> why it cannot be a client
    unanswered: Counter[int] = field(default_factory=Counter)  # node -> queries without an answer

    def wait(self, seconds: float) -> None:
        """Wait until every client has a node."""
        end = time.monotonic() + seconds
        while len(self.nodes) < len(self.sizes):
            if self.stopping.is_set():
                raise Stopped
            left = end - time.monotonic()
            if left <= 0:
                raise TooFew(self._missing(seconds))
            self.refresh(left)
            self.unanswered.clear()
            time.sleep(min(POLL_INTERVAL, left))

    def refresh(self, timeout: float | None = None) -> None:
        """Remove nodes that have disconnected and assign clients to new ones."""
        timeout, online = timeout or QUERY_TIMEOUT, set(self.grid.get_node_ids())
        self.nodes = {k: node for k, node in self.nodes.items() if node in online}
        given_up = {node for node, n in self.unanswered.items() if n >= MAX_UNANSWERED}
        new = self._query(sorted(online - {*self.claims, *self.refused, *given_up}), timeout)
        contested = {self.nodes[k] for k in new.values() if k in self.nodes}
        answering = self._query(sorted(contested), timeout)
        self.nodes = {k: node for k, node in self.nodes.items() if node not in contested or node in answering}
        self.claims |= new
        for node, k in self.claims.items():
            if node in online and node not in contested:
                self.nodes.setdefault(k, node)

    def _query(self, nodes: list[int], timeout: float) -> dict[int, int]:
        """The clients these nodes claim to be, by node; why a claim is refused is noted in `refused`."""
        content = RecordDict({ROUND: ConfigRecord()})
        messages = {node: Message(content, node, "query", ttl=timeout) for node in nodes}
        replies = collect_replies(self.grid, messages, timeout, self.stopping)
        claims: dict[int, int] = {}
        for node in nodes:
            reply = replies.get(node)
            if reply is None or (reply.has_error() and reply.error.code not in (REFUSED, UNREADABLE)):
                self.unanswered[node] += 1  # also for Flower's own errors, of a node that is down
                continue
            try:
                claims[node] = self._claim(reply)
            except Refused as error:
                self.refused[node] = str(error)
        return claims

    def _claim(self, reply: Message) -> int:
        """The client number in a reply."""
        record = contents(reply).config_records.get(NODE, ConfigRecord())
        client, samples = record.get("client"), record.get("samples")
        if type(client) is not int or not 0 <= client < len(self.sizes):
            raise Refused(f"client: {client!r} is not one of 0 to {len(self.sizes) - 1}")
        expected = self.sizes[client] if self.own_data else 0
        if samples != expected:
            raise Refused(f"client {client} has {samples!r} samples of its own, the server knows {expected}")
        return client

    def _missing(self, seconds: float) -> str:
        missing = [k for k in range(len(self.sizes)) if k not in self.nodes]
        shown = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
        spare = {n: f"client {k} is node {self.nodes[k]}" for n, k in self.claims.items() if self.nodes.get(k, n) != n}
        why = "".join(f"; node {node}: {reason}" for node, reason in [*self.refused.items(), *spare.items()][:4])
        return f"{len(self.nodes)} of {len(self.sizes)} clients are there after {seconds:g} s; missing: {shown}{why}"
