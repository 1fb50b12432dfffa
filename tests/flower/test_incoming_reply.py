"""A reply is pulled part by part: nobody waits until it is complete, and its limit acts before bytes arrive."""

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedman.flower import incoming_reply, messages
from fedman.flower.incoming_reply import BadReply, IncomingReply, largest_reply
from fedman.flower.replies import PendingReplies
from tests.flower.local_grid import LocalGrid


class SuperLink:
    """What a SuperLink answers to a grid: each reply once, after it all messages that nodes have sent on their own, and
    those of a reply's objects that have been uploaded."""

    def __init__(self):
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.replies, self.objects, self.late, self.sent = {}, {}, set(), 0
        self.unasked, self.trees, self.piece = [], {}, 2**16  # messages of nodes' own; bytes that arrive at once
        self.grid = HttpGrid(token="token")
        self.grid.set_run(Run.create_empty(1))
        self.grid._client = RuntimeHttpClient("http://superlink")
        self.grid._client._client = httpx.Client(transport=httpx.MockTransport(self.answer))

    def incoming(self, arrays: dict[str, Array], limit: int = 10**9, node: int = 1) -> IncomingReply:
        """The reply of a node, with these arrays."""
        order = Message(RecordDict(), node, "train")
        order.metadata.__dict__["_message_id"] = order.object_id
        reply = self.stored(Message(RecordDict({"upload": ArrayRecord(arrays)}), reply_to=order))
        self.replies[order.metadata.message_id] = reply
        return IncomingReply(self.grid, order, limit)

    def stored(self, message: Message) -> Message:
        """A message that was uploaded."""
        message.metadata.__dict__["_message_id"] = message.object_id
        self.trees[message.object_id] = get_object_tree(message)
        self.objects |= {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
        return message

    def answer(self, request: httpx.Request) -> httpx.Response:
        path, found = request.url.path, ConfirmMessageReceivedResponse()
        if path.endswith("pull-messages"):
            (name,) = PullAppMessagesRequest.FromString(request.content).message_ids
            found = PullAppMessagesResponse()
            for message in filter(None, (self.replies.pop(name, None), *self.unasked)):
                found.message_object_trees.append(self.trees[message.metadata.message_id])
                found.messages_list.append(message_to_proto(remove_content_from_message(message)))
            self.unasked.clear()
        elif path.endswith("pull-object"):
            name = PullObjectRequest.FromString(request.content).object_id
            there = name in self.objects and name not in self.late
            found = PullObjectResponse(object_found=name in self.objects, object_available=there)
            found.object_content = self.objects[name] if there else b""
        content = found.SerializeToString()

        def body():
            for start in range(0, len(content), self.piece):
                self.sent += len(content[start : start + self.piece])
                yield content[start : start + self.piece]

        return httpx.Response(200, headers={"content-length": str(len(content))}, content=body())


@pytest.fixture
def superlink(monkeypatch):
    """Nobody's turn ends because this machine is slow."""
    monkeypatch.setattr(incoming_reply, "TURN", 600.0)
    return SuperLink()


def numbers(count: int) -> Array:
    return Array(np.random.default_rng(0).integers(0, 256, count, np.uint8))


def test_a_reply_is_complete_once_all_its_parts_are_there(superlink):
    """The SuperLink announces it once, and its sender may take as long as it likes."""
    incoming = superlink.incoming({"w": numbers(1000)})
    superlink.late = set(superlink.objects)
    for name in superlink.objects:
        assert incoming.pull() is None
        superlink.late.remove(name)
    reply = incoming.pull()
    assert np.array_equal(reply.content["upload"]["w"].numpy(), numbers(1000).numpy())


def unasked(arrays: int) -> Message:
    """What a node can send to the server without having been asked."""
    return Message(RecordDict({"upload": ArrayRecord({f"{i:05}": numbers(10 + i) for i in range(arrays)})}), 1, "train")


@pytest.mark.parametrize("piece", [1, 2, 100, 2**16])
@pytest.mark.parametrize("arrays", [1, 200])
def test_a_message_that_replies_to_nothing_is_neither_a_reply_nor_keeps_one_from_being_read(arrays, piece, superlink):
    """However large it is: of an announcement beyond the limit the first message is read, which is the reply's."""
    incoming = superlink.incoming({"w": numbers(1000)}, limit=4000)
    superlink.piece, (order, reply) = piece, superlink.replies.popitem()
    superlink.unasked = [superlink.stored(unasked(arrays))]
    assert incoming.pull() is None
    superlink.replies, superlink.unasked, superlink.sent = {order: reply}, [superlink.stored(unasked(arrays))], 0
    assert incoming.pull().content["upload"]["w"] == numbers(1000)
    assert superlink.sent < 4000 + piece


def test_an_announcement_larger_than_a_reply_can_be_is_none(superlink):
    incoming = superlink.incoming({"w": numbers(1000)}, limit=4000)
    (reply,) = superlink.replies.values()
    reply.metadata.__dict__["_group_id"], superlink.piece = "x" * 100_000, 100
    assert incoming.pull() is None
    assert superlink.sent < 200


def test_whose_reply_it_is_does_not_follow_from_what_it_says(superlink):
    """The SuperLink checks what it announces, not what the reply's own object says."""
    incoming = superlink.incoming({"w": numbers(1)}, node=7)
    other, order = superlink.incoming({"w": numbers(2)}, node=8).order, incoming.order.metadata
    lie = superlink.stored(Message(RecordDict({"upload": ArrayRecord({"w": numbers(3)})}), reply_to=other))
    superlink.replies[order.message_id] = lie
    lie.metadata.__dict__["_reply_to_message_id"] = order.message_id
    found = incoming.pull()
    assert found.content["upload"]["w"] == numbers(3)
    assert (found.metadata.reply_to_message_id, found.metadata.src_node_id) == (order.message_id, 7)


def test_only_what_a_reply_is_made_of_is_pulled(superlink):
    """Another node can have announced parts of it before, as made of something that never comes."""
    incoming = superlink.incoming({"w": numbers(1000)})
    for tree in superlink.trees.values():
        tree.children.add(object_id="0" * 64)
    assert incoming.pull().content["upload"]["w"] == numbers(1000)


def test_a_reply_that_does_not_come_keeps_nobody_elses_from_being_read(superlink):
    pending = PendingReplies(superlink.grid, 10**9)
    pending.waiting = {0: superlink.incoming({"w": numbers(100)})}
    superlink.late = set(superlink.objects)
    pending.waiting |= {k: superlink.incoming({"w": numbers(100 + k)}, node=k) for k in (1, 2)}
    assert pending.arrived().keys() == {1, 2}
    assert pending.waiting.keys() == {0}


def test_a_reply_whose_upload_was_given_up_is_an_error_of_its_sender(superlink):
    pending = PendingReplies(superlink.grid, 10**9)
    pending.waiting = {7: superlink.incoming({"w": numbers(100)})}
    superlink.objects.clear()
    assert pending.arrived()[7].error.reason == "reply: its upload was not completed"


def test_a_reply_of_many_parts_takes_turns(superlink, monkeypatch):
    monkeypatch.setattr(incoming_reply, "TURN", 0.0)
    incoming = superlink.incoming({str(i): numbers(i) for i in range(1, 9)})
    pulls = 1
    while incoming.pull() is None:
        pulls += 1
    assert pulls == len(superlink.objects) + 1


def test_a_part_beyond_the_limit_is_not_received(superlink):
    """The limit is on all parts together."""
    whole = superlink.incoming({"w": numbers(100_000), "v": numbers(100_001)})
    assert whole.pull() is not None
    small, superlink.sent = superlink.incoming({"w": numbers(100_000), "v": numbers(100_001)}, whole.received - 1), 0
    with pytest.raises(BadReply, match=f"reply: has more than {whole.received - 1} bytes"):
        small.pull()
    assert superlink.sent < whole.received
    most = max(map(len, superlink.objects.values()))
    one, superlink.sent = superlink.incoming({"w": numbers(100_000)}, most - 1), 0
    with pytest.raises(BadReply):
        one.pull()
    assert superlink.sent < 10_000


@pytest.mark.parametrize(("copies", "good"), [(2, True), (5, True), (6, False), (1000, False)])
def test_an_array_that_names_its_chunk_many_times_is_refused(copies, good, superlink):
    """A few thousand bytes could be unpacked to a million."""
    array = numbers(1000)
    head, body = array.deflate().split(b"\0")
    ids = b", ".join([b"0"] * copies)
    incoming = superlink.incoming({"w": array}, limit=6000)
    superlink.objects[array.object_id] = head + b"\0" + body.replace(b"[0]}", b"[" + ids + b"]}")
    if good:
        assert incoming.pull().content["upload"]["w"].data == copies * array.data
    else:
        with pytest.raises(BadReply, match="has more than 6000 bytes when it is unpacked"):
            incoming.pull()


@pytest.mark.parametrize("other", [20_000, 5_000_000])
@pytest.mark.parametrize("size", [10, 5_000_000, 5_300_000, 12_000_000])
def test_honest_arrays_of_every_size_pass(size, other, superlink):
    """Also small buffers beside a model, with the limit that the server sets for them."""
    arrays = {"w": numbers(size), "model.buffers": numbers(other)}
    assert superlink.incoming(arrays, largest_reply([size, other])).pull() is not None


def test_other_calls_and_other_times_have_no_limit(superlink):
    client = superlink.grid._client._client
    with superlink.incoming({}, limit=-1)._limited(client):
        client.post("http://superlink/v1/runtime/send-task-heartbeat")
        with pytest.raises(BadReply):
            client.post("http://superlink/v1/runtime/pull-object")
    client.post("http://superlink/v1/runtime/pull-object")


def test_a_reply_beyond_the_limit_is_an_error_of_its_sender(tmp_path):
    grid = LocalGrid.of(2, tmp_path)
    grid.alter = lambda query, reply: BadReply("too large") if query.metadata.dst_node_id == 100 else reply
    pending = PendingReplies(grid, 1000)
    content = RecordDict({messages.ROUND: ConfigRecord()})
    pending.send({k: Message(content, 100 + k, "query", ttl=5.0) for k in range(2)})
    arrived = pending.arrived()
    assert (arrived[0].error.code, arrived[0].error.reason) == (messages.UNREADABLE, "too large")
    assert arrived[1].has_content()


def test_the_proxys_limit_is_above_every_honest_request():
    """docs/flower-tls.md: client_max_body_size 6m, as Flower sends arrays in parts."""
    records = RecordDict({"upload": ArrayRecord({"w": Array(np.zeros(5_000_000, np.float32))})})
    sizes = [len(part.deflate()) for part in get_all_nested_objects(records).values()]
    assert len(sizes) == 6
    assert max(sizes) < 6 * 2**20 - 10_000
