"""A reply that is pulled from the SuperLink part by part: never waited for, and limited before its bytes arrive.

A reply consists of objects, which a node uploads after it has announced the reply. Flower's `Grid.pull_messages` waits
for all of them, for up to two hours: one node that uploads slowly, or never, would keep the server from reading the
others' replies until these have expired. Flower also has no limit on their size. So the objects are pulled here, those
that are there, with the calls that Flower's grid makes. A response says in its header how long it is, and is refused
before its bytes arrive. An array is put together from chunks, and can name the same chunk many times: a small reply
could be unpacked to a large one, so its size is counted before it is unpacked.

A node can also send messages that reply to nothing. The SuperLink adds them to whatever it announces next, after the
reply that was asked for. They are never taken for a reply and do not count for its size. Whose reply it is follows from
the order, not from what the reply says.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import httpx
from flwr.app import Array, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import HttpGrid

ANNOUNCEMENT, OBJECT = "/pull-messages", "/pull-object"  # the ends of the paths by which a reply is pulled
OTHER_BYTES = 100_000  # of an honest reply, beside its arrays
ARRAY_BYTES = 2_000  # of each of its arrays, beside the numbers: name, header, the ids of parts
TURN = 1.0  # seconds after which it is the next reply's turn, however many objects this one has


class BadReply(Exception):
    """A reply is larger than it may be, or parts of it are gone."""


def largest_reply(arrays: Iterable[int]) -> int:
    """The most bytes that an honest reply has whose arrays have so many each."""
    return OTHER_BYTES + sum(int(1.1 * nbytes) + ARRAY_BYTES for nbytes in arrays)


class IncomingReply:
    """The reply to an order, of at most `limit` bytes, as it is sent and as it is unpacked."""

    def __init__(self, grid: Grid, order: Message, limit: int) -> None:
        self.grid, self.order, self.limit = grid, order, limit
        self.name = ""  # the reply's message id, once it is announced
        self.missing: dict[str, None] = {}  # objects that are known of and not there yet; the last is pulled next
        self.objects: dict[str, bytes] = {}
        self.received = 0

    def pull(self) -> Message | None:
        """Receive what is there; the reply, once it is complete."""
        if isinstance(self.grid, HttpGrid):
            reply = self._receive(self.grid)
        else:  # in a simulation replies are complete
            reply = next(iter(self.grid.pull_messages([self.order.metadata.message_id])), None)
        if reply is None:
            return None
        return Message(reply.error if reply.has_error() else reply.content, reply_to=self.order)

    def _receive(self, grid: HttpGrid) -> Message | None:
        """The reply, once the SuperLink has all of it."""
        runtime, node, run = grid._runtime_client, grid.node, grid.run.run_id
        end = time.monotonic() + TURN
        with self._limited(runtime._client):
            if not self.name and not self._announced(runtime):
                return None
            while self.missing:
                name = next(reversed(self.missing))
                answer = runtime.PullObject(PullObjectRequest(node=node, run_id=run, object_id=name))
                if not answer.object_found:
                    raise BadReply("reply: its upload was not completed")
                if not answer.object_available:
                    return None
                self._keep(answer.object_content)
                if time.monotonic() > end:
                    return None
        if sum(self._unpacked(content) for content in self.objects.values()) > self.limit:
            raise BadReply(f"reply: has more than {self.limit} bytes when it is unpacked")
        received = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=self.name)
        runtime.ConfirmMessageReceived(received)
        return cast(Message, inflate_object_from_contents(self.name, self.objects))

    def _announced(self, runtime: RuntimeHttpClient) -> bool:
        """Whether there is a reply to the order. The SuperLink, which has checked its sender, announces it once."""
        asked = self.order.metadata.message_id
        for reply in runtime.PullMessages(PullAppMessagesRequest(message_ids=[asked])).messages_list:
            if reply.metadata.reply_to_message_id == asked:
                self.name, self.received = reply.metadata.message_id, reply.ByteSize()
                self.missing = {self.name: None}
        return bool(self.name)

    def _keep(self, content: bytes) -> None:
        """Keep an object that was received; those that it is made of are missing next."""
        self.received += len(content)
        name, _ = self.missing.popitem()
        self.objects[name] = content
        _, parts, _ = get_object_head_values_from_object_content(content)
        self.missing |= dict.fromkeys(part for part in parts if part not in self.objects)

    def _unpacked(self, content: bytes) -> int:
        """The bytes of which an array is put together; 0 for other objects."""
        kind, parts, _ = get_object_head_values_from_object_content(content)
        if kind != Array.__qualname__:
            return 0
        chunks = json.loads(content.partition(b"\0")[2])["arraychunk_ids"]
        return sum(len(self.objects[parts[i]]) for i in chunks)

    @contextmanager
    def _limited(self, client: httpx.Client) -> Iterator[None]:
        """Let no response arrive that makes the reply too large: raise `BadReply` before its bytes do.

        Of a larger announcement only the first message arrives, as others may have sent the rest.
        """

        def check(response: httpx.Response) -> None:
            length = float(response.headers.get("content-length", math.inf))
            if self.received + length <= self.limit:
                return
            if response.url.path.endswith(OBJECT):
                raise BadReply(f"reply: has more than {self.limit} bytes")
            if response.url.path.endswith(ANNOUNCEMENT):
                body = cast(httpx.SyncByteStream, response.stream)
                response.stream = httpx.ByteStream(_first_message(body, self.limit))
                body.close()

        before = client.event_hooks
        client.event_hooks = {**before, "response": [*before["response"], check]}
        try:
            yield
        finally:
            client.event_hooks = before


def _first_message(body: Iterable[bytes], most: int) -> bytes:
    """The bytes of the first message of an announcement: a tag, the message's length in digits of seven bits, the
    message. Nothing if they are more than `most`."""
    head = b""
    for part in body:
        head += part
        last = next((i for i, byte in enumerate(head[1:10], 1) if byte < 128), None)
        if last is None:
            continue
        size = last + 1 + sum((byte & 127) << 7 * i for i, byte in enumerate(head[1 : last + 1]))
        if size > most:
            break
        if len(head) >= size:
            return head[:size]
    return b""
