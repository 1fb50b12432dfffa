"""Which node is which client: by the keys of a roster file, or by the key that first worked as a client."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedman.errors import TooFew, UserError
from fedman.execution.executor import Stopped
from fedman.flower.messages import NODE, REFUSED, ROUND, UNREADABLE
from fedman.flower.replies import POLL_INTERVAL, PendingReplies
from fedman.flower.screen import Refused, contents

QUERY_TIMEOUT = 60.0  # seconds a node has to say who it is; it is asked again after that time
LARGEST_ANSWER = 10_000  # bytes of that answer


@dataclass
class Roster:
    """Which node is which client.

    A new node is asked for its client number. A number belongs to a key: that of `keys`, if there is a roster, or the
    one in `bound`, whose node was the first to work as this client; a node with another key is refused. While a number
    is not bound, the first node that claims it has it, and another one that claims it once the first no longer answers.

    Nothing here waits for a node that does not answer, except for `wait`, which needs all clients.
    """

    grid: Grid
    sizes: list[int]  # samples of each client
    own_data: bool  # whether clients bring data of their own
    stopping: threading.Event
    keys: dict[int, str] | None = None  # client -> key, from a roster
    bound: dict[int, str] = field(default_factory=dict)  # client -> key, from the rounds so far
    nodes: dict[int, int] = field(default_factory=dict)  # client -> node
    claims: dict[int, int] = field(default_factory=dict)  # node -> client
    refused: dict[int, str] = field(default_factory=dict)  # node -> why it cannot be a client
    key_of: dict[int, str] = field(default_factory=dict)  # node -> key
    _asked: dict[int, float] = field(default_factory=dict)  # node -> when
    _silent: set[int] = field(default_factory=set)  # nodes that have let a query pass

    def __post_init__(self) -> None:
        self._queries = PendingReplies(self.grid, LARGEST_ANSWER)

    def wait(self, seconds: float) -> None:
        """Wait until every client has a node."""
        end = time.monotonic() + seconds
        self.refresh()
        while len(self.nodes) < len(self.sizes):
            if self.stopping.is_set():
                raise Stopped
            if time.monotonic() >= end:
                raise TooFew(self._missing(seconds))
            time.sleep(POLL_INTERVAL)
            self.refresh()

    @property
    def hopeful(self) -> bool:
        """Whether a node has been asked for the first time and may still answer."""
        return bool(self._queries.waiting.keys() - self._silent - self.refused.keys())

    def is_settled(self, k: int) -> bool:
        """Whether client k has a node that is not being asked whether it still is there."""
        return k in self.nodes and self.nodes[k] not in self._queries.waiting

    def refresh(self) -> None:
        """Remove nodes that have disconnected, ask new ones, and assign clients to those that have answered."""
        self.key_of = {node.node_id: _key(node) for node in self.grid.get_nodes()}
        self._ask_new()
        contested = self._read_answers()
        for node, k in list(self.claims.items()):
            try:
                self._check_key(node, k)
            except Refused as error:  # the number has been bound to another node's key since
                self._refuse(node, str(error))
        online = {node: k for node, k in self.claims.items() if node in self.key_of}
        self.nodes = {k: node for k, node in self.nodes.items() if online.get(node) == k}
        for node, k in online.items():
            self.nodes.setdefault(k, node)
        self._ask(sorted(contested & online.keys()))

    def _ask_new(self) -> None:
        """Ask nodes that are no client, unless they have been asked a short time ago: refused ones may be mended."""
        due = time.monotonic() - QUERY_TIMEOUT
        others = self.key_of.keys() - self.claims.keys() - self._queries.waiting.keys()
        new = [node for node in sorted(others) if self._asked.get(node, due) <= due]
        if self.keys is not None:
            for node in new:
                if self.key_of[node] not in self.keys.values():
                    self._refuse(node, f"its key {self.key_of[node]} is not in the roster")
            new = [node for node in new if self.key_of[node] in self.keys.values()]
        self._ask(new)

    def _ask(self, nodes: list[int]) -> None:
        content = RecordDict({ROUND: ConfigRecord()})
        self._queries.send({node: Message(content, node, "query", ttl=QUERY_TIMEOUT) for node in nodes})
        self._asked |= dict.fromkeys(nodes, time.monotonic())

    def _read_answers(self) -> set[int]:
        """Note which clients nodes claim to be, and which nodes do not answer.

        Returns the nodes of clients that another node claims to be.
        """
        contested = set()
        for node, reply in self._queries.arrived().items():
            if reply.has_error() and reply.error.code not in (REFUSED, UNREADABLE):
                self._give_up(node)  # Flower's own error, of a node that is down
                continue
            try:
                k = self._claim(reply)
                self._check_key(node, k)
            except Refused as error:
                self._refuse(node, str(error))
                continue
            if node not in self.claims and k in self.nodes:
                contested.add(self.nodes[k])
            self.claims[node] = k
            self._silent.discard(node)
            self.refused.pop(node, None)
        late = time.monotonic() - QUERY_TIMEOUT
        for node in [node for node in self._queries.waiting if self._asked[node] <= late]:
            del self._queries.waiting[node]
            self._give_up(node)
        return contested

    def _check_key(self, node: int, k: int) -> None:
        """Refuse a node whose key is not the one that client k is bound to."""
        own = self.key_of.get(node, "")
        owner = self.bound.get(k, own) if self.keys is None else self.keys[k]
        if own and own != owner:
            raise Refused(f"claims to be client {k}, whose key is {owner}; its own is {own}")

    def _give_up(self, node: int) -> None:
        self._silent.add(node)
        self.claims.pop(node, None)

    def _refuse(self, node: int, reason: str) -> None:
        self.claims.pop(node, None)
        self.refused[node] = reason

    def _claim(self, reply: Message) -> int:
        """The client number in a reply."""
        record = contents(reply).config_records.get(NODE, ConfigRecord())
        client, samples = record.get("client"), record.get("samples")
        if type(client) is not int or not 0 <= client < len(self.sizes):
            raise Refused(f"client: {client!r:.40} is not one of 0 to {len(self.sizes) - 1}")
        expected = self.sizes[client] if self.own_data else 0
        if samples != expected:
            raise Refused(f"client {client} has {samples!r:.40} samples of its own, the server knows {expected}")
        return client

    def _missing(self, seconds: float) -> str:
        missing = [k for k in range(len(self.sizes)) if k not in self.nodes]
        shown = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
        spare = {n: f"client {k} is node {self.nodes[k]}" for n, k in self.claims.items() if self.nodes.get(k, n) != n}
        why = "".join(f"; node {node}: {reason}" for node, reason in [*self.refused.items(), *spare.items()][:4])
        return f"{len(self.nodes)} of {len(self.sizes)} clients are there after {seconds:g} s; missing: {shown}{why}"


def _key(node: NodeInfo) -> str:
    """The fingerprint of a node's public key, or where the grid does not know it, the node's number."""
    try:
        return fingerprint(load_pem_public_key(node.public_key))
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return f"SHA256:{_sha256(node.public_key)}" if node.public_key else f"of node {node.node_id}"


def fingerprint(key: object) -> str:
    """A public key's fingerprint, as `ssh-keygen -l` prints it."""
    if not isinstance(key, EllipticCurvePublicKey):
        raise TypeError("not an ECDSA key")
    return f"SHA256:{_sha256(base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1]))}"


def _sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def read_roster(path: Path, clients: int) -> dict[int, str]:
    """The fingerprints of the clients' keys, from lines with a client's number and its public key.

    A line is what `echo "0 $(cat north.pub)"` prints. Empty lines and lines that begin with # are comments.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"roster: {path}: cannot be read ({error})") from None
    keys: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        where, (client, _, text) = f"roster: {path}: line {number}", line.strip().partition(" ")
        if not (client.isascii() and client.isdigit() and len(client) < 10) or int(client) >= clients:
            raise UserError(f"{where}: {client[:40]!r} is not one of the clients 0 to {clients - 1}")
        try:
            key = fingerprint(load_ssh_public_key(text.encode()))
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise UserError(f"{where}: {text[:40]!r} is not an ECDSA public key, ecdsa-sha2-nistp384 AAAA…") from None
        if int(client) in keys or key in keys.values():
            raise UserError(f"{where}: client {client} or its key stands in a line before")
        keys[int(client)] = key
    if missing := [k for k in range(clients) if k not in keys]:
        raise UserError(f"roster: {path}: has no key of client {missing[0]}; wanted are keys of 0 to {clients - 1}")
    return keys
