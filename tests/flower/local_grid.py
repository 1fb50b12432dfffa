"""A grid in this process: real client apps, real messages, no network. Replies can be altered on the way.

Messages are serialised and deserialised, as over a network.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.app.message import make_message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from fedman.flower import client
from fedman.training.batches import Samples

Alter = Callable[[Message, Message], Message | Exception | None]
"""(order, reply) -> what arrives in place of the reply: None for nothing, an exception if it cannot be unpacked."""


@dataclass
class LocalGrid(Grid):
    """Nodes by id, each with its node config. A message is answered as soon as it is pushed."""

    nodes: dict[int, dict[str, str | int]]
    alter: Alter = lambda order, reply: reply
    app: ClientApp = client.app
    run_config: dict[str, str | int | float] = field(default_factory=dict)
    replies: dict[str, Message | Exception] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    sent: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    @staticmethod
    def of(clients: int, memory: Path, **config: str) -> LocalGrid:
        """One node for each client; node 100 + k is client k."""
        return LocalGrid({100 + k: {"partition-id": k, "memory-dir": str(memory), **config} for k in range(clients)})

    def set_run(self, run) -> None:
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            number = str(next(self.numbers))
            message.metadata.__dict__["_message_id"] = number
            numbers.append(number)
            self.sent.append(message)
            node = message.metadata.dst_node_id
            if node in self.nodes:
                context = Context(1, node, dict(self.nodes[node]), RecordDict(), dict(self.run_config))
                reply = self.alter(message, self.app(serialised(message), context))
                if reply is not None:
                    self.replies[number] = reply if isinstance(reply, Exception) else serialised(reply)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = [self.replies.pop(number) for number in message_ids if number in self.replies]
        for reply in found:
            if isinstance(reply, Exception):
                raise reply
        return found


def serialised(message: Message) -> Message:
    """The message as its receiver gets it."""
    content = message.content if message.has_content() else None
    if content is not None:
        parts = {name: part.deflate() for name, part in get_all_nested_objects(content).items()}
        content = inflate_object_from_contents(content.object_id, parts)
    return make_message(message.metadata, content=content, error=message.error if message.has_error() else None)


def serve_samples(
    data: Samples, model: Callable[[], nn.Module], keys: Mapping[str, Any], folder: Path, monkeypatch, **node: str
):
    """The result of a run in which every client of `data` has a file of samples of its own; all take part in every
    round. `model` replaces the configured one; `node` is what every node is started with."""
    from fedman.config import resolve
    from fedman.flower.server import serve
    from fedman.flower.server_options import ServerOptions
    from fedman.runs import build

    monkeypatch.setattr(build, "initial_model", lambda *given: model())
    x, y, sizes = data.x.numpy(), data.y.numpy(), [len(part) for part in data.parts]
    np.savez(folder / "server.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    grid = LocalGrid.of(len(sizes), folder / "memory", **node)
    for k, part in enumerate(data.parts):
        np.savez(folder / f"client{k}.npz", x=x[part], y=y[part])
        grid.nodes[100 + k]["data"] = str(folder / f"client{k}.npz")
    own = {"dataset": f"npz:{folder}/server.npz", "clients": len(sizes), "participation": 1.0, "precision": "fp64"}
    service = ServerOptions(sizes=tuple(sizes), wait=0.2, round_timeout=5.0, retries=0)
    return serve(grid, resolve({**own, **keys}), service, out=folder / "out", device="cpu")
