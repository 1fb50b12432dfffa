"""MAN in an existing Flower app: the loss, the mod, and the example that uses both."""

from __future__ import annotations

import math

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import nn

from fedman import ActivationNorm
from fedman.errors import UserError
from fedman.flower import Screened, man_mod, with_man
from fedman.flower.strategy import TAG, TAGGED
from tests.flower.deployment import Deployment
from tests.flower.dropin_example import EXAMPLE, ROUNDS, fedavg, start
from tests.flower.local_grid import LocalGrid


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


def test_a_missing_zeta_is_an_error_that_says_how_to_give_it():
    with pytest.raises(UserError, match="zeta: not given; with_man"):
        with_man(nn.CrossEntropyLoss(), model())


def test_the_mod_returns_the_term_and_the_tag():
    replies = []
    start(Screened(fedavg()), lambda order, reply: replies.append((order, reply)) or reply)
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
    with pytest.raises(UserError, match="zeta: not given"):  # the mod's zeta is valid for one message only
        with_man(nn.CrossEntropyLoss(), net)


def test_man_lowers_the_activations_of_the_example():
    with_term, without = (start(Screened(fedavg()), zeta=zeta) for zeta in (0.05, 0.0))
    last = [result.train_metrics_clientapp[ROUNDS]["man"] for result in (with_term, without)]
    assert last[0] < last[1]


@pytest.mark.slow
@pytest.mark.xdist_group("deployment")
def test_the_example_runs_as_it_is(tmp_path):
    with Deployment(tmp_path, warm=True) as federation:
        federation.start_nodes({f"node{k}": f"partition-id={k}" for k in range(2)})
        run = federation.run(EXAMPLE, "num-server-rounds=1 num-nodes=2")
    assert run.completed, run.details + run.log
    assert "round 1: accuracy" in run.log
