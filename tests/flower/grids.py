"""A grid in this process: Flower's messages without Flower's network, for tests that need many rounds quickly.

What is sent is taken apart to bytes and put together again, as on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from flwr.app import Context, Message, RecordDict
from flwr.app.message import make_message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

Spoil = Callable[[int, Message], Message | Exception | None]
"""What becomes of a client's reply: another one, something that cannot be unpacked, or no reply at all."""


class LocalGrid(Grid):
    """Nodes 100, 101, ... each with a ClientApp and a node config."""

    def __init__(self, app: ClientApp, configs: list[dict[str, Any]], spoil: Spoil = lambda node, reply: reply) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.spoil = app, spoil
        self.contexts = {
            100 + i: Context(run_id=1, node_id=100 + i, node_config=config, state=RecordDict(), run_config={})
            for i, config in enumerate(configs)
        }
        self.replies: dict[str, Message | Exception] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid4().hex
            ids.append(message.metadata.message_id)
            node = message.metadata.dst_node_id
            reply = self.app(message=over_the_wire(message), context=self.contexts[node])
            spoilt = self.spoil(node, reply)
            if spoilt is not None:
                self.replies[ids[-1]] = spoilt if isinstance(spoilt, Exception) else over_the_wire(spoilt)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = [self.replies.pop(number) for number in message_ids if number in self.replies]
        for reply in found:
            if isinstance(reply, Exception):
                raise reply
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError


def over_the_wire(message: Message) -> Message:
    """The message as its receiver gets it."""
    content = message.content if message.has_content() else None
    if content is not None:
        parts = {name: part.deflate() for name, part in get_all_nested_objects(content).items()}
        content = inflate_object_from_contents(content.object_id, parts)
    return make_message(message.metadata, content=content, error=message.error if message.has_error() else None)
