"""A grid in this process: real client apps, real messages, no network. What happens on the way can be changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedman.flower import client

Alter = Callable[[Message, Message], Message | None]
"""(order, reply) -> what arrives in place of the reply; None: nothing does."""


@dataclass
class LocalGrid(Grid):
    """Nodes by id, each with its node config. A message is worked on as soon as it is pushed."""

    nodes: dict[int, dict[str, str | int]]
    alter: Alter = lambda order, reply: reply
    boxes: dict[str, Message] = field(default_factory=dict)
    numbers: Iterable[int] = field(default_factory=lambda: itertools.count(1))
    sent: list[Message] = field(default_factory=list)

    @staticmethod
    def of(clients: int, memory: Path, **config: str) -> LocalGrid:
        """One node for each client; node 100 + k is client k."""
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        return LocalGrid({100 + k: {"partition-id": k, "memory-dir": str(memory), **config} for k in range(clients)})

    def set_run(self, run) -> None:
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            number = str(next(iter(self.numbers)))
            message.metadata.__dict__["_message_id"] = number
            numbers.append(number)
            self.sent.append(message)
            node = message.metadata.dst_node_id
            if node in self.nodes:
                context = Context(1, node, dict(self.nodes[node]), RecordDict(), {})
                reply = self.alter(message, client.app(message, context))
                if reply is not None:
                    self.boxes[number] = reply
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.boxes.pop(number) for number in message_ids if number in self.boxes]
