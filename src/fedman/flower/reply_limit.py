"""A limit on the size of a reply, which acts before its bytes are received and unpacked.

A reply consists of objects, which Flower pulls one by one over HTTP and keeps in memory until it has all of them. Each
response says in its header how long it is, so the pull can be stopped before the bytes arrive. An array is put together
from chunks, and can name the same chunk many times: a small reply could be unpacked to a large one. Flower has no
setting for either, so a hook of httpx counts both, on the HTTP client of Flower's grid.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid

MESSAGES, OBJECT = "/pull-messages", "/pull-object"  # the ends of the paths by which a reply and its objects are pulled


class ReplyTooLarge(Exception):
    """A reply is larger than it may be."""


@contextmanager
def reply_limit(grid: Grid, limit: int | None) -> Iterator[None]:
    """Raise `ReplyTooLarge` if what is pulled from the grid has more than `limit` bytes in all.

    Arrays may be unpacked to twice as many: their size is estimated by their number of chunks and the largest one, and
    the last chunk of an array is smaller.
    """
    if limit is None or not isinstance(grid, HttpGrid):
        yield
        return
    client: httpx.Client = grid._runtime_client._client
    received = largest = chunks = 0
    lock = threading.Lock()  # objects are pulled in several threads

    def count(response: httpx.Response) -> None:
        nonlocal received, largest, chunks
        if not response.url.path.endswith((MESSAGES, OBJECT)):
            return
        length = int(response.headers.get("content-length", limit + 1))
        with lock:
            received += length
            if received > limit:
                raise ReplyTooLarge(f"reply: has more than {limit} bytes")
        if response.url.path.endswith(OBJECT):
            named = _chunks(response.read())
            with lock:
                largest, chunks = max(largest, length), chunks + named
                if chunks * largest > 2 * limit:
                    raise ReplyTooLarge(f"reply: has more than {2 * limit} bytes when it is unpacked")

    before = client.event_hooks
    client.event_hooks = {**before, "response": [*before["response"], count]}
    try:
        yield
    finally:
        client.event_hooks = before


def _chunks(response: bytes) -> int:
    """The number of chunks of which an array is put together; 0 for other objects."""
    kind, _, rest = PullObjectResponse.FromString(response).object_content.partition(b" ")
    return len(json.loads(rest.partition(b"\0")[2])["arraychunk_ids"]) if kind == b"Array" else 0
