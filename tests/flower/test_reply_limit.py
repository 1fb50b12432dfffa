"""The limit on a reply's bytes: acts before they are received, on what is pulled alone, and only while it is set."""

from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.superlink.grid import HttpGrid

from fedman.flower import backend, messages
from fedman.flower.replies import PendingReplies
from fedman.flower.reply_limit import ReplyTooLarge, reply_limit
from tests.flower.local_grid import LocalGrid

PULL = "http://superlink/v1/runtime/pull-object"


def grid_that_answers(answer):
    """A grid whose SuperLink's answers are these, and its HTTP client."""
    client = httpx.Client(transport=httpx.MockTransport(answer))
    grid = HttpGrid(token="token")
    grid._client = SimpleNamespace(_client=client)
    return grid, client


@pytest.fixture
def wire():
    """A grid whose SuperLink answers with 1000 bytes; the grid, its HTTP client, and the bytes that were received."""
    received, whole = [], PullObjectResponse(object_content=b"x" * 997).SerializeToString()

    def body():
        for i in range(10):
            received.append(100)
            yield whole[100 * i : 100 * (i + 1)]

    def answer(request):
        return httpx.Response(200, headers={"content-length": "1000"}, content=body())

    assert len(whole) == 1000
    return *grid_that_answers(answer), received


def test_a_response_beyond_the_limit_is_not_received(wire):
    grid, client, received = wire
    with reply_limit(grid, 999), pytest.raises(ReplyTooLarge, match="reply: has more than 999 bytes"):
        client.post(PULL)
    assert received == []
    with reply_limit(grid, 1000):
        client.post(PULL)
    assert sum(received) == 1000


def test_the_limit_is_on_all_parts_of_a_reply_together(wire):
    grid, client, received = wire
    with reply_limit(grid, 2500):
        client.post("http://superlink/v1/runtime/pull-messages")
        client.post(PULL)
        with pytest.raises(ReplyTooLarge):
            client.post(PULL)
    assert sum(received) == 2000


@pytest.mark.parametrize(("copies", "good"), [(2, True), (1000, False)])
def test_an_array_that_names_its_chunk_many_times_is_refused(copies, good):
    """A few thousand bytes could be unpacked to a million."""
    array = Array(np.zeros(1000, np.uint8))
    head, body = array.deflate().split(b"\0")
    ids = b", ".join([b"0"] * copies)
    parts = [array.slice_array()[0][1].deflate(), head + b"\0" + body.replace(b"[0]}", b"[" + ids + b"]}")]
    answers = iter(httpx.Response(200, content=PullObjectResponse(object_content=p).SerializeToString()) for p in parts)
    grid, client = grid_that_answers(lambda request: next(answers))
    with reply_limit(grid, 6000):
        client.post(PULL)
        if good:
            client.post(PULL)
        else:
            with pytest.raises(ReplyTooLarge, match="has more than 12000 bytes when it is unpacked"):
                client.post(PULL)


@pytest.mark.parametrize("size", [10, 5_000_000, 5_300_000, 12_000_000])
def test_honest_arrays_of_every_size_pass(size):
    """Two arrays, with the limit that the server sets for them."""
    rng = np.random.default_rng(0)
    records = ArrayRecord({name: Array(rng.integers(0, 256, size, np.uint8)) for name in ("w", "v")})
    parts = iter([part.deflate() for part in get_all_nested_objects(records).values()])
    grid, client = grid_that_answers(
        lambda request: httpx.Response(200, content=PullObjectResponse(object_content=next(parts)).SerializeToString())
    )
    with reply_limit(grid, int(1.1 * 2 * size) + backend.OTHER_BYTES):
        for _ in get_all_nested_objects(records):
            client.post(PULL)


def test_other_calls_and_other_times_have_no_limit(wire):
    grid, client, received = wire
    with reply_limit(grid, 10):
        client.post("http://superlink/v1/runtime/send-task-heartbeat")
    client.post(PULL)
    with reply_limit(grid, None):
        client.post(PULL)
    with reply_limit(LocalGrid({}), 10):
        client.post(PULL)
    assert sum(received) == 4000


def test_a_reply_beyond_the_limit_is_an_error_of_its_sender(tmp_path):
    grid = LocalGrid.of(2, tmp_path)
    grid.alter = lambda query, reply: ReplyTooLarge("too large") if query.metadata.dst_node_id == 100 else reply
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
