"""A run with hostile clients ends as the run without them, or with the stated error; it never hangs."""

from __future__ import annotations

import math

import pytest
import torch
from flwr.app import Array, Message

from fedman.config import resolve
from fedman.data import load
from fedman.errors import TooFew
from fedman.flower.server import serve
from fedman.flower.server_options import ServerOptions
from fedman.runs.key_text import overrides
from tests.federations import simulator
from tests.flower.hostile import KINDS, spoil
from tests.flower.local_grid import LocalGrid

ROUNDS, CLIENTS, LIAR = 2, 4, 3
WORDS = (
    "dataset=digits model=mlp participation=1 cohort=fixed partition=dir0.3 unbalanced=0.3 algorithm=feddc zeta=0.05"
)
WORDS += f" epochs=1 chunk=1 clients={CLIENTS} rounds={ROUNDS} eval_every={ROUNDS}"
CONFIG = resolve(overrides(WORDS.split()))


@pytest.fixture(scope="module")
def honest() -> dict[tuple[int, ...], torch.Tensor]:
    """The simulator's final θ with these clients in every round."""
    data = load(*CONFIG.source)
    found = {}
    for cohort in ((0, 1, 2), (0, 1, 2, 3)):
        machine = simulator(CONFIG, data)
        state = machine.start()
        for _ in range(ROUNDS):
            machine.round(state, list(cohort))
        found[cohort] = state.server["w"]
    return found


def play(folder, alter=lambda order, reply: reply, **options):
    grid = LocalGrid.of(CLIENTS, folder / "memory")
    grid.alter = alter
    options = ServerOptions(**{"retries": 1, "round_timeout": 30.0, **options})
    return serve(grid, CONFIG, options, out=folder / "run", device="cpu")


def theta(result) -> torch.Tensor:
    return torch.cat([v.flatten() for v in result.models["cloud"].values()])


def by_the_liar(change):
    """Change the liar's replies to rounds, not to queries."""
    return lambda order, reply: change(reply) if is_round(order) and order.metadata.dst_node_id == 100 + LIAR else reply


def is_round(order: Message) -> bool:
    return order.metadata.message_type == "train"


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_reply_has_no_influence_and_its_reason_is_recorded(kind, tmp_path, honest):
    result = play(tmp_path, by_the_liar(lambda reply: spoil(kind, reply)))
    assert torch.equal(theta(result), honest[0, 1, 2])
    assert [list(record["refused"]) for record in result.rounds] == [[str(LIAR)]] * ROUNDS
    assert all(reason for record in result.rounds for reason in record["refused"].values())


def test_without_a_liar_nobody_is_refused(tmp_path, honest):
    result = play(tmp_path)
    assert torch.equal(theta(result), honest[0, 1, 2, 3])
    assert [record["refused"] for record in result.rounds] == [{}] * ROUNDS


def test_a_reply_of_the_round_before_is_refused_by_its_tag(tmp_path, honest):
    """The whole old content again, not only its tag."""
    old = []

    def again(reply: Message) -> Message:
        old.append(reply.content)
        reply.content = old[0]
        return reply

    result = play(tmp_path, by_the_liar(again), retries=0)
    assert result.rounds[0]["refused"] == {}
    assert result.rounds[1]["refused"] == {str(LIAR): "reply: is not a reply to this round's order (round 0 for 1)"}
    assert not torch.equal(theta(result), honest[0, 1, 2])


def test_a_model_far_from_all_others_is_refused_within_its_reach(tmp_path, honest):
    """A distance that clipped steps could cover, but that no other client covers."""

    def pushed(reply: Message) -> Message:
        w = reply.content["upload"]["w"].numpy()
        reply.content["upload"]["w"] = Array(w + w.dtype.type(3 / len(w) ** 0.5))
        return reply

    strict = play(tmp_path / "strict", by_the_liar(pushed), norm_factor=4.0)
    assert torch.equal(theta(strict), honest[0, 1, 2])
    assert "times the median" in strict.rounds[0]["refused"][str(LIAR)]
    loose = play(tmp_path / "loose", by_the_liar(pushed), norm_factor=math.inf)
    assert loose.rounds[0]["refused"] == {}


def test_a_reply_that_cannot_be_unpacked_affects_its_sender_only(tmp_path, honest):
    result = play(tmp_path, by_the_liar(lambda reply: ValueError("no such object")))
    assert torch.equal(theta(result), honest[0, 1, 2])
    assert result.rounds[0]["refused"] == {str(LIAR): "its reply cannot be read (ValueError)"}


def test_a_silent_client_is_left_out_after_the_time_limit(tmp_path, honest):
    result = play(tmp_path, by_the_liar(lambda reply: None), retries=0, round_timeout=1.0)
    assert torch.equal(theta(result), honest[0, 1, 2])
    assert result.rounds[0]["refused"] == {str(LIAR): "no reply within 1 s"}


def test_a_client_that_is_bad_once_is_asked_again(tmp_path, honest):
    spoilt = []

    def once(reply: Message) -> Message:
        spoilt.append(1)
        return spoil("NaN", reply) if len(spoilt) == 1 else reply

    result = play(tmp_path, by_the_liar(once), quorum=1.0)
    assert torch.equal(theta(result), honest[0, 1, 2, 3])
    assert [record["attempts"] for record in result.rounds] == [2, 1]


def test_too_few_good_replies_end_the_run_with_its_own_error(tmp_path):
    def all_but_one(order, reply):
        return spoil("NaN", reply) if is_round(order) and order.metadata.dst_node_id != 100 else reply

    with pytest.raises(
        TooFew, match="round 1: 1 good replies from a cohort of 4, 2 are needed, after 2 attempts; client"
    ):
        play(tmp_path, all_but_one)
