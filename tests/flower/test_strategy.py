"""`Screened`: honest replies give the strategy's own result, and refused ones have no influence on it."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.exception import AggregationError
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedman.errors import UserError
from fedman.flower import Screened, strategy
from fedman.flower.incoming_reply import largest_reply
from fedman.flower.replies import PendingReplies
from fedman.flower.strategy import TAG, TAGGED
from tests.flower.dropin_example import LIAR, NODES, ROUNDS, fedavg, start, task, unaltered
from tests.flower.local_grid import LocalGrid

EXAMPLES = {100: 30, 101: 10, LIAR: 20}


def weights(result) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in result.arrays.items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def test_honest_replies_give_the_result_of_the_strategy_itself():
    counts = {100 + k: len(task.loaders(k, NODES)[0].dataset) for k in range(NODES)}
    screened, stock = start(Screened(fedavg(), examples=counts)), start(fedavg())
    assert weights(screened).keys() == weights(stock).keys()
    for name, array in weights(screened).items():
        np.testing.assert_allclose(array, weights(stock)[name], rtol=1e-5, atol=1e-6)
    assert screened.evaluate_metrics_clientapp[ROUNDS]["accuracy"] == pytest.approx(
        stock.evaluate_metrics_clientapp[ROUNDS]["accuracy"]
    )


def change(name: str, array: np.ndarray):
    def spoil(reply: Message) -> None:
        reply.content["arrays"][name] = Array(array)

    return spoil


def claim(name: str, value: float):
    def spoil(reply: Message) -> None:
        reply.content["metrics"][name] = value

    return spoil


BIAS = "layers.4.bias"
HOSTILE = {
    "NaN": (change(BIAS, np.full(10, np.nan, np.float32)), "10 of 10 numbers are not finite"),
    "huge": (change(BIAS, np.full(10, 1e9, np.float32)), "times the median"),
    "broadcasts": (change(BIAS, np.zeros(1, np.float32)), r"is float32 \(1,\)"),
    "dtype": (change(BIAS, np.zeros(10)), "is float64"),
    "extra": (change("more", np.zeros(1, np.float32)), "arrays: has"),
    "missing": (lambda reply: reply.content["arrays"].pop(BIAS), "arrays: has"),
    "another record": (lambda r: r.content.__setitem__("b", ArrayRecord()), "has 2 records of arrays"),
    "no metrics": (lambda reply: reply.content.pop("metrics"), "has 0 records of metrics"),
    "loss NaN": (claim("loss", math.nan), "'loss': nan is not finite"),
    "odd names": (claim("odd", 1.0), "metrics: has 'loss, man, num-examples, odd'"),
    "old tag": (lambda r: r.content[TAGGED].__setitem__(TAG, "old"), "tag: 'old' is not this round's"),
    "no tag": (lambda reply: reply.content.pop(TAGGED), "tag: None is not this round's"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_refused_reply_has_no_influence(kind):
    spoil, reason = HOSTILE[kind]

    def alter(order: Message, reply: Message) -> Message:
        if order.metadata.dst_node_id == LIAR and order.metadata.message_type == "train":
            spoil(reply)
        return reply

    strategy = Screened(fedavg(), examples=EXAMPLES)
    result = start(strategy, alter)
    assert same(weights(result), weights(start(Screened(fedavg(2), examples=EXAMPLES), nodes=(100, 101))))
    assert list(strategy.refused) == [1, 2]
    for refused in strategy.refused.values():
        assert list(refused) == [LIAR]
        assert re.search(reason, refused[LIAR])


def test_a_reply_that_cannot_be_unpacked_does_not_end_the_run():
    def alter(order: Message, reply: Message) -> Message | Exception:
        return ValueError("no such object") if order.metadata.dst_node_id == LIAR else reply

    strategy = Screened(fedavg(), examples=EXAMPLES)
    result = start(strategy, alter)
    assert same(weights(result), weights(start(Screened(fedavg(2), examples=EXAMPLES), nodes=(100, 101))))
    assert strategy.refused[1] == {LIAR: "its reply cannot be read (ValueError)"}


@pytest.mark.parametrize(
    ("name", "hostile", "reason"),
    [
        ("norm.running_var", np.float32([1.0, -1e-9]), "norm.running_var: 1 of 2 variances are negative"),
        ("phases", np.complex64([30j, 0]), "w: lies 30 from where it started, 21.2 times the median"),
        ("norm.num_batches_tracked", np.int64([10**18, 0]), None),
    ],
)
def test_arrays_of_all_kinds_are_screened(name, hostile, reason):
    """But for the distance of whole numbers, as the document says."""
    LocalGrid({})  # messages need a sender
    nodes, screened = (100, 101, LIAR), Screened(fedavg())
    sent = ArrayRecord({"w": Array(np.zeros(2, np.float32)), name: Array(np.zeros_like(hostile))})
    messages = [Message(RecordDict({"arrays": sent}), node, "train") for node in nodes]
    for message in messages:
        message.metadata.__dict__["_message_id"] = message.object_id
    screened.strategy.configure_train = lambda *given: messages
    asked = list(screened.configure_train(1, sent, ConfigRecord(), None))
    replies = []
    for message in asked:
        other = hostile if message.metadata.dst_node_id == LIAR else np.zeros_like(hostile)
        arrays = ArrayRecord({"w": Array(np.ones(2, np.float32)), name: Array(other)})
        records = {"arrays": arrays, "metrics": MetricRecord({"loss": 1.0}), TAGGED: message.content[TAGGED]}
        replies.append(Message(RecordDict(records), reply_to=message))
    screened.aggregate_train(1, replies)
    assert screened.refused == {1: {} if reason is None else {LIAR: reason}}


def test_a_reply_is_limited_by_the_arrays_that_were_sent(monkeypatch):
    """In a deployment, where replies come in parts: see `IncomingReply`."""
    limits, sizes = [], []

    class Noted(PendingReplies):
        def __init__(self, grid, limit):
            limits.append(limit)
            super().__init__(grid, limit)

    def weigh(order: Message, reply: Message) -> Message:
        sizes.append(sum(len(part.deflate()) for part in get_all_nested_objects(reply).values()))
        return reply

    monkeypatch.setattr(strategy, "PendingReplies", Noted)
    start(Screened(fedavg()), weigh)
    assert len(limits) == 2 * ROUNDS
    assert max(sizes) < min(limits) <= max(limits) < max(sizes) + 150_000


def test_an_honest_reply_of_many_small_arrays_is_within_the_limit():
    arrays = {f"blocks.{i}.attention.projection.bias": Array(np.ones(1, np.float32)) for i in range(1000)}
    parts = get_all_nested_objects(ArrayRecord(arrays)).values()
    assert sum(len(part.deflate()) for part in parts) < largest_reply(len(a.data) for a in arrays.values()) - 100_000


@pytest.mark.parametrize("weight", [1e30, -5, 0])
def test_a_claimed_weight_is_not_used(weight):
    def alter(order: Message, reply: Message) -> Message:
        if order.metadata.dst_node_id == LIAR:
            reply.content["metrics"]["num-examples"] = weight
        return reply

    lied, honest = (start(Screened(fedavg(), examples=EXAMPLES), a) for a in (alter, unaltered))
    assert same(weights(lied), weights(honest))
    assert lied.evaluate_metrics_clientapp == honest.evaluate_metrics_clientapp


def test_too_few_good_replies_end_with_flowers_exit_code():
    def alter(order: Message, reply: Message) -> Message | None:
        return None if order.metadata.dst_node_id == LIAR else reply

    with pytest.raises(
        AggregationError, match="round 1: 2 good replies of 3, 3 are needed; node 102: no reply in time"
    ) as error:
        start(Screened(fedavg(), min_replies=3), alter)
    assert error.value.exit_code == 202


@pytest.mark.parametrize(
    "bad", [{"examples": {1: 0}}, {"examples": {1: 1.5}}, {"norm_factor": 1}, {"norm_factor": math.nan}]
)
def test_bad_options_are_named(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Screened(fedavg(), **bad)
