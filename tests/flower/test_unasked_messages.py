"""Messages to the server that reply to nothing, with Flower's own handlers: nobody answers in another node's place."""

from __future__ import annotations

import time
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.common.serde import message_to_proto
from flwr.proto import message_pb2, runtime_pb2
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate.linkstate_factory import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.grid import HttpGrid
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers as handlers

from fedman.flower.replies import PendingReplies

CALLS = {
    "push-messages": (runtime_pb2.PushAppMessagesRequest, handlers.push_messages),
    "pull-messages": (runtime_pb2.PullAppMessagesRequest, handlers.pull_messages),
    "push-object": (message_pb2.PushObjectRequest, handlers.push_object),
    "pull-object": (message_pb2.PullObjectRequest, handlers.pull_object),
    "confirm-message-received": (message_pb2.ConfirmMessageReceivedRequest, handlers.confirm_message_received),
}


class SuperLink:
    """Flower's SuperLink in this process, with a run and two nodes."""

    def __init__(self, database: str) -> None:
        self.state = LinkStateFactory(database, NoOpFederationManager(), ObjectStoreFactory(database)).state()
        self.honest, self.hostile = (
            self.state.create_node(key, key, key.encode(), 600.0) for key in ("north", "south")
        )
        for node in (self.honest, self.hostile):
            self.state.activate_node(node, 600.0)
        self.run = self.state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        task = self.state.get_run_info(run_ids=[self.run])[0].primary_task_id
        self.state.claim_task(task)
        self.state.activate_task(task)
        self.task = SimpleNamespace(run_id=self.run, task_id=task)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = self.run, 1, task
        self.grid = HttpGrid(token="token")
        self.grid.set_run(Run.create_empty(self.run))
        self.grid._client = RuntimeHttpClient("http://superlink")
        self.grid._client._client = httpx.Client(transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.state.acknowledge_task_heartbeat(self.task.task_id)
        kind, handle = CALLS[request.url.path.rsplit("/", 1)[1]]
        content = handle(kind.FromString(request.content), self.state, self.task).SerializeToString()
        return httpx.Response(200, headers={"content-length": str(len(content))}, content=content)

    def push(self, node: int, message: Message) -> None:
        """Send a message from a node, with all of its objects."""
        message.metadata.__dict__["_message_id"] = message.object_id
        announced, trees = message_to_proto(remove_content_from_message(message)), [get_object_tree(message)]
        request = PushMessagesRequest(node=Node(node_id=node), messages_list=[announced], message_object_trees=trees)
        wanted = fleet_handlers.push_messages(request, self.state)
        for name, part in get_all_nested_objects(message).items():
            if name in wanted.objects_to_push:
                about = {"node": Node(node_id=node), "run_id": self.run, "session_id": wanted.session_id}
                whole = PushObjectRequest(**about, object_id=name, object_content=part.deflate())
                self.state.acknowledge_task_heartbeat(self.task.task_id)  # a run without one ends after a minute
                fleet_handlers.push_object(whole, self.state)

    def unasked(self, arrays: int) -> Message:
        """A message to the server that replies to nothing."""
        metadata = Metadata(
            run_id=self.run, message_id="", src_node_id=1, dst_node_id=1, reply_to_message_id="", group_id="",
            created_at=time.time(), ttl=600.0, message_type="train",
        )  # fmt: skip
        return make_message(metadata, content=upload(-1.0, arrays))


def upload(value: float, arrays: int = 1) -> RecordDict:
    values = {"w" if i == 0 else str(i): Array(np.full(3 + i, value, np.float32)) for i in range(arrays)}
    return RecordDict({"reply": ConfigRecord({"client": 0}), "upload": ArrayRecord(values)})


@pytest.mark.parametrize("arrays", [1, 100])
@pytest.mark.parametrize("database", [FLWR_IN_MEMORY_DB_NAME, "state.db"])
def test_nobody_answers_in_the_place_of_the_node_that_was_asked(database, arrays, tmp_path):
    """Small, it was taken for the reply; large, the reply was refused for it."""
    superlink = SuperLink(str(tmp_path / database) if database == "state.db" else database)
    pending = PendingReplies(superlink.grid, 50_000)
    pending.send({0: Message(upload(0.0), superlink.honest, "train", ttl=600.0)})
    order = pending.waiting[0].order
    superlink.push(superlink.hostile, superlink.unasked(arrays))
    assert pending.arrived() == {}
    superlink.push(superlink.hostile, superlink.unasked(arrays))
    superlink.push(superlink.honest, Message(upload(1.0), reply_to=order))
    superlink.push(superlink.hostile, superlink.unasked(arrays))
    while not (found := pending.arrived()):
        assert pending.waiting[0].name  # announced: on a slow machine its objects take turns
    (reply,) = found.values()
    assert reply.content["upload"]["w"].numpy().tolist() == [1.0] * 3
