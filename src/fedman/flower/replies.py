"""Messages to nodes over Flower's grid, and their replies, each of which affects its sender only."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import httpx
from flwr.app import Error, Message
from flwr.serverapp import Grid

from fedman.execution.executor import Stopped
from fedman.flower.messages import UNREADABLE
from fedman.flower.reply_limit import ReplyTooLarge, reply_limit

POLL_INTERVAL = 0.1  # seconds


class PendingReplies:
    """Messages that have been sent and not been answered, by a key of the caller's: a node or a client.

    Replies are pulled one by one. One that cannot be unpacked, or that is larger than `limit` bytes, becomes an error
    of its sender's; of a larger one no more than `limit` bytes are received.
    """

    def __init__(self, grid: Grid, limit: int | None = None) -> None:
        self.grid, self.limit = grid, limit
        self.waiting: dict[int, Message] = {}

    def send(self, messages: Mapping[int, Message]) -> None:
        """Send the messages."""
        if messages:
            self.grid.push_messages(list(messages.values()))
            self.waiting |= messages

    def arrived(self) -> dict[int, Message]:
        """The replies that have arrived since the last call; does not wait."""
        replies = {}
        for key, message in list(self.waiting.items()):
            try:
                with reply_limit(self.grid, self.limit):
                    found = list(self.grid.pull_messages([message.metadata.message_id]))
            except (httpx.HTTPError, OSError):
                raise  # the SuperLink's fault, not the client's
            except ReplyTooLarge as error:
                found = [Message(Error(UNREADABLE, str(error)), reply_to=message)]
            except Exception as error:
                reason = f"its reply cannot be read ({type(error).__name__})"
                found = [Message(Error(UNREADABLE, reason), reply_to=message)]
            if found:
                replies[key] = found[0]
                del self.waiting[key]
        return replies


def collect_replies(
    grid: Grid, messages: Mapping[int, Message], timeout: float, stopping: threading.Event
) -> dict[int, Message]:
    """Send the messages and wait until all replies have arrived or the time is over."""
    pending, replies = PendingReplies(grid), dict[int, Message]()
    pending.send(messages)
    end = time.monotonic() + timeout
    while pending.waiting and time.monotonic() < end:
        if stopping.is_set():
            raise Stopped
        replies |= pending.arrived()
        if pending.waiting:
            time.sleep(POLL_INTERVAL)
    return replies
