"""Messages to nodes over Flower's grid, and their replies, each of which affects its sender only."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
from flwr.app import Error, Message
from flwr.serverapp import Grid

from fedman.flower.incoming_reply import BadReply, IncomingReply
from fedman.flower.messages import UNREADABLE

POLL_INTERVAL = 0.1  # seconds


class PendingReplies:
    """Messages that have been sent and not been answered, by a key of the caller's: a node or a client.

    A reply that is late, or only partly there, does not delay the others. One that cannot be unpacked, or that is
    larger than `limit` bytes, becomes an error of its sender's.
    """

    def __init__(self, grid: Grid, limit: int) -> None:
        self.grid, self.limit = grid, limit
        self.waiting: dict[int, IncomingReply] = {}

    def send(self, messages: Mapping[int, Message]) -> None:
        """Send the messages."""
        if messages:
            self.grid.push_messages(list(messages.values()))
            self.waiting |= {key: IncomingReply(self.grid, message, self.limit) for key, message in messages.items()}

    def arrived(self) -> dict[int, Message]:
        """The replies that have arrived since the last call; does not wait."""
        replies = {}
        for key, incoming in list(self.waiting.items()):
            try:
                reply = incoming.pull()
            except (httpx.HTTPError, OSError):
                raise  # the SuperLink's fault, not the client's
            except BadReply as error:
                reply = Message(Error(UNREADABLE, str(error)), reply_to=incoming.order)
            except Exception as error:
                reason = f"its reply cannot be read ({type(error).__name__})"
                reply = Message(Error(UNREADABLE, reason), reply_to=incoming.order)
            if reply is not None:
                replies[key] = reply
                del self.waiting[key]
        return replies
