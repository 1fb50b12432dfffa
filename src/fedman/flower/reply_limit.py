"""A limit on the bytes of a reply, which acts before they are received.

A reply consists of objects, which Flower pulls one by one over HTTP and keeps in memory until it has all of them. Each
response says in its header how long it is, so the pull can be stopped before the bytes arrive. Flower has no setting
for this, so a hook of httpx does it, on the HTTP client of Flower's grid.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid

PULL = ("/pull-messages", "/pull-object")  # the ends of the paths by which a reply and its objects are pulled


class ReplyTooLarge(Exception):
    """A reply has more bytes than it may have."""


@contextmanager
def reply_limit(grid: Grid, limit: int | None) -> Iterator[None]:
    """Raise `ReplyTooLarge` if what is pulled from the grid has more than `limit` bytes in all."""
    if limit is None or not isinstance(grid, HttpGrid):
        yield
        return
    client: httpx.Client = grid._runtime_client._client
    received, lock = 0, threading.Lock()  # objects are pulled in several threads

    def count(response: httpx.Response) -> None:
        nonlocal received
        if response.url.path.endswith(PULL):
            with lock:
                received += int(response.headers.get("content-length", limit + 1))
                if received > limit:
                    raise ReplyTooLarge(f"reply: has more than {limit} bytes")

    before = client.event_hooks
    client.event_hooks = {**before, "response": [*before["response"], count]}
    try:
        yield
    finally:
        client.event_hooks = before
