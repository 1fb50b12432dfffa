"""A reply that is pulled from the SuperLink part by part: never waited for, and limited before its bytes arrive.

A reply consists of objects, which a node uploads after it has announced the reply. Flower's `Grid.pull_messages` waits
for all of them, for up to two hours: one node that uploads slowly, or never, would keep the server from reading the
others' replies until these have expired. Flower also has no limit on their size. So the objects are pulled here, those
that are there, with the calls that Flower's grid makes. A response says in its header how long it is, and is refused
before its bytes arrive. An array is put together from chunks, and can name the same chunk many times: a small reply
could be unpacked to a large one, so chunks are counted.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import httpx
from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import HttpGrid

PULLS = ("/pull-messages", "/pull-object")  # the ends of the paths by which a reply and its objects are pulled
TURN = 1.0  # seconds after which it is the next reply's turn, however many objects this one has


class BadReply(Exception):
    """A reply is larger than it may be, or parts of it are gone."""


class IncomingReply:
    """The reply to an order, of at most `limit` bytes.

    Arrays may be unpacked to twice as many: their size is estimated by their number of chunks and the largest one, and
    the last chunk of an array is smaller.
    """

    def __init__(self, grid: Grid, order: Message, limit: float = math.inf) -> None:
        self.grid, self.order, self.limit = grid, order, limit
        self.name = ""  # the reply's message id, once it is announced
        self.missing: list[str] = []  # objects, in the order in which they are pulled
        self.objects: dict[str, bytes] = {}
        self.received = self.largest = self.chunks = 0

    def pull(self) -> Message | None:
        """Receive what is there; the reply, once it is complete."""
        if not isinstance(self.grid, HttpGrid):  # in a simulation replies are complete
            return next(iter(self.grid.pull_messages([self.order.metadata.message_id])), None)
        runtime, node, run = self.grid._runtime_client, self.grid.node, self.grid.run.run_id
        end = time.monotonic() + TURN
        with self._limited(runtime._client):
            if not self.name and not self._announced(runtime):
                return None
            while self.missing:
                answer = runtime.PullObject(PullObjectRequest(node=node, run_id=run, object_id=self.missing[0]))
                if not answer.object_found:
                    raise BadReply("reply: its upload was not completed")
                if not answer.object_available:
                    return None
                self._keep(answer.object_content)
                if time.monotonic() > end:
                    return None
        received = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=self.name)
        runtime.ConfirmMessageReceived(received)
        message = cast(Message, inflate_object_from_contents(self.name, self.objects))
        message.metadata.__dict__["_message_id"] = self.name
        return message

    def _announced(self, runtime: RuntimeHttpClient) -> bool:
        """Whether there is a reply; if so, note its parts. The SuperLink announces it once."""
        found = runtime.PullMessages(PullAppMessagesRequest(message_ids=[self.order.metadata.message_id]))
        for reply, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            self.name, self.received = reply.metadata.message_id, found.ByteSize()
            self.missing = list(dict.fromkeys(part.object_id for part in iterate_object_tree(tree)))
        return bool(self.name)

    def _keep(self, content: bytes) -> None:
        """Keep an object that was received."""
        self.received += len(content)
        self.largest, self.chunks = max(self.largest, len(content)), self.chunks + _chunks(content)
        if self.chunks * self.largest > 2 * self.limit:
            raise BadReply(f"reply: has more than {2 * self.limit} bytes when it is unpacked")
        self.objects[self.missing.pop(0)] = content

    @contextmanager
    def _limited(self, client: httpx.Client) -> Iterator[None]:
        """Raise `BadReply` before a response arrives that makes the reply too large."""

        def check(response: httpx.Response) -> None:
            length = float(response.headers.get("content-length", math.inf))
            if response.url.path.endswith(PULLS) and self.received + length > self.limit:
                raise BadReply(f"reply: has more than {self.limit} bytes")

        before = client.event_hooks
        client.event_hooks = {**before, "response": [*before["response"], check]}
        try:
            yield
        finally:
            client.event_hooks = before


def _chunks(content: bytes) -> int:
    """The number of chunks of which an array is put together; 0 for other objects."""
    kind, _, rest = content.partition(b" ")
    return len(json.loads(rest.partition(b"\0")[2])["arraychunk_ids"]) if kind == b"Array" else 0
