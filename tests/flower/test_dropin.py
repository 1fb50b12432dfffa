"""The drop-in: MAN in an existing ClientApp, Flower's own strategies behind a screen, the example that does both."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from deployment import Deployment
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import FedAvg
from local_grid import LocalGrid
from torch import nn

from fedman import ActivationNorm
from fedman.errors import UserError
from fedman.flower import Screened, man_mod, with_man
from fedman.flower.strategy import TAG, TAGGED

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_dropin"
NODES, ROUNDS, LIAR = 3, 2, 102
CONFIG = {"num-server-rounds": ROUNDS, "num-nodes": NODES, "lr": 0.1, "zeta": 0.05}
EXAMPLES = {100: 30, 101: 10, LIAR: 20}


@pytest.fixture(scope="module")
def example():
    """The example's modules, as the project imports them."""
    sys.path.insert(0, str(EXAMPLE))
    import digits_app.client_app
    import digits_app.task

    yield digits_app
    sys.path.remove(str(EXAMPLE))


def start(example, strategy, alter=lambda order, reply: reply, nodes=(100, 101, LIAR), zeta=0.05):
    """The example's rounds with a strategy: the result of `Strategy.start`."""
    grid = LocalGrid({n: {"partition-id": n - 100} for n in nodes}, alter, example.client_app.app, run_config=CONFIG)
    torch.manual_seed(0)
    arrays = ArrayRecord(example.task.Net().state_dict())
    config = ConfigRecord({"zeta": zeta})
    return strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS, train_config=config, timeout=1)


def fedavg(nodes=NODES) -> FedAvg:
    return FedAvg(min_available_nodes=nodes, min_train_nodes=nodes, min_evaluate_nodes=nodes)


def weights(result) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in result.arrays.items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


X, Y = torch.arange(8.0).reshape(2, 4) / 8, torch.tensor([0, 2])


def test_the_loss_is_the_criterions_plus_zeta_times_the_term():
    net = model()
    logits = net(X)
    plain, term = nn.functional.cross_entropy(logits, Y), net[1](net[0](X)).square().mean() + logits.square().mean()
    loss = with_man(nn.CrossEntropyLoss(), net, zeta=0.3)
    assert torch.allclose(loss(net(X), Y), plain + 0.3 * term, rtol=1e-6)
    with torch.no_grad():
        assert torch.equal(loss(net(X), Y), plain)


def test_zeta_zero_is_the_plain_loss_bit_for_bit():
    net = model()
    plain = nn.functional.cross_entropy(net(X), Y)
    expected = torch.autograd.grad(plain, list(net.parameters()))
    loss = with_man(nn.CrossEntropyLoss(), net, zeta=0)(net(X), Y)
    assert torch.equal(loss, plain)
    assert all(
        torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, list(net.parameters())), expected, strict=True)
    )


@pytest.mark.parametrize("zeta", [-1, math.nan, math.inf, "0.1", True])
def test_a_bad_zeta_is_named(zeta):
    with pytest.raises(UserError, match=r"zeta: .* is not a finite number of at least 0"):
        with_man(nn.CrossEntropyLoss(), model(), zeta=zeta)


def test_without_any_zeta_the_user_is_told_how_to_give_one():
    with pytest.raises(UserError, match="zeta: not given; with_man"):
        with_man(nn.CrossEntropyLoss(), model())


def test_the_mod_brings_zeta_in_and_the_term_and_the_tag_out(example):
    replies = []
    start(example, Screened(fedavg()), lambda order, reply: replies.append((order, reply)) or reply)
    for order, reply in replies:
        assert reply.content[TAGGED][TAG] == order.content[TAGGED][TAG]
        assert ("man" in reply.content["metrics"]) == (order.metadata.message_type == "train")


def test_the_term_that_is_reported_is_the_mean_over_the_batches():
    net, terms = model(), []
    man = ActivationNorm(net)
    for x in (X, X + 1):
        net(x)
        terms.append(man().item())

    def work(message: Message, context: object) -> Message:
        loss = with_man(nn.CrossEntropyLoss(), net)
        for x in (X, X + 1):
            loss(net(x), Y)
        return message

    LocalGrid({})  # gives messages of this process a sender
    message = Message(RecordDict({"config": ConfigRecord({"zeta": 0.1})}), 1, "train")
    reply = man_mod(message, None, work)
    assert reply.content["metrics"]["man"] == pytest.approx(sum(terms) / 2)
    with pytest.raises(UserError, match="zeta: not given"):  # what the mod knew is forgotten
        with_man(nn.CrossEntropyLoss(), net)


def test_man_lowers_the_activations_of_the_example(example):
    with_term, without = (start(example, Screened(fedavg()), zeta=zeta) for zeta in (0.05, 0.0))
    last = [result.train_metrics_clientapp[ROUNDS]["man"] for result in (with_term, without)]
    assert last[0] < last[1]


def test_honest_replies_give_the_stock_strategys_result(example):
    counts = {100 + k: len(example.task.loaders(k, NODES)[0].dataset) for k in range(NODES)}
    screened, stock = start(example, Screened(fedavg(), examples=counts)), start(example, fedavg())
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
def test_a_refused_reply_leaves_no_trace(kind, example):
    spoil, reason = HOSTILE[kind]

    def alter(order: Message, reply: Message) -> Message:
        if order.metadata.dst_node_id == LIAR and order.metadata.message_type == "train":
            spoil(reply)
        return reply

    strategy = Screened(fedavg(), examples=EXAMPLES)
    result = start(example, strategy, alter)
    assert same(weights(result), weights(start(example, Screened(fedavg(2), examples=EXAMPLES), nodes=(100, 101))))
    assert list(strategy.refused) == [1, 2]
    for refused in strategy.refused.values():
        assert list(refused) == [LIAR]
        assert re.search(reason, refused[LIAR])


def test_a_reply_that_cannot_be_unpacked_does_not_end_the_run(example):
    def alter(order: Message, reply: Message) -> Message | Exception:
        return ValueError("no such object") if order.metadata.dst_node_id == LIAR else reply

    strategy = Screened(fedavg(), examples=EXAMPLES)
    result = start(example, strategy, alter)
    assert same(weights(result), weights(start(example, Screened(fedavg(2), examples=EXAMPLES), nodes=(100, 101))))
    assert strategy.refused[1] == {LIAR: "the client says: a reply that cannot be read (ValueError)"}


@pytest.mark.parametrize("weight", [1e30, -5, 0])
def test_a_claimed_weight_is_not_used(weight, example):
    def alter(order: Message, reply: Message) -> Message:
        if order.metadata.dst_node_id == LIAR:
            reply.content["metrics"]["num-examples"] = weight
        return reply

    lied, honest = (start(example, Screened(fedavg(), examples=EXAMPLES), a) for a in (alter, lambda o, r: r))
    assert same(weights(lied), weights(honest))
    assert lied.evaluate_metrics_clientapp == honest.evaluate_metrics_clientapp


def test_too_few_good_replies_end_with_flowers_exit_code(example):
    def alter(order: Message, reply: Message) -> Message | None:
        return None if order.metadata.dst_node_id == LIAR else reply

    with pytest.raises(
        AggregationError, match="round 1: 2 good replies of 3, 3 are needed; node 102: no reply in time"
    ) as error:
        start(example, Screened(fedavg(), min_replies=3), alter)
    assert error.value.exit_code == 202


@pytest.mark.parametrize(
    "bad", [{"examples": {1: 0}}, {"examples": {1: 1.5}}, {"norm_factor": 1}, {"norm_factor": math.nan}]
)
def test_bad_options_are_named(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Screened(fedavg(), **bad)


@pytest.mark.xdist_group("deployment")
def test_the_example_runs_as_it_is(tmp_path):
    with Deployment(tmp_path, warm=True) as federation:
        federation.start_nodes({f"node{k}": f"partition-id={k}" for k in range(2)})
        run = federation.run(EXAMPLE, "num-server-rounds=1 num-nodes=2", timeout=300)
    assert run.completed, run.details + run.log
    assert "round 1: accuracy" in run.log
