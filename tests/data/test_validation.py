"""The validation part: drawn by a seed, every class its share, taken from the clients and from nobody else."""

import time
from dataclasses import replace

import numpy as np
import pytest

import fedman
from fedman.config import resolve
from fedman.data import load, partition
from fedman.data.validation import held_out, in_place_of_test, without
from fedman.errors import UserError
from fedman.paper.flatness.finished_runs import FinishedRun, select_samples
from fedman.runs.build import build, stack_key
from tests.federations import SMALL

DIGITS = load("digits")


@pytest.mark.parametrize("share", [0.1, 0.37, 0.5])
def test_every_class_gives_its_share(share):
    labels = np.repeat([0, 1, 2, 4], [50, 7, 200, 1])
    held = held_out(labels, share, 3)
    assert len(held) == round(share * 258)
    assert held.tolist() == sorted({*held.tolist()})
    for label in (0, 1, 2, 4):
        assert abs((labels[held] == label).sum() - share * (labels == label).sum()) <= 1
    assert held.tolist() == held_out(labels, share, 3).tolist() != held_out(labels, share, 4).tolist()


def test_the_part_stays_what_it_is():
    """A change of it would make tunings of before and after incomparable."""
    assert held_out(np.arange(12) % 3, 0.5, 0).tolist() == [0, 2, 3, 5, 7, 10]
    assert held_out(np.arange(10) % 2, 0.1, 0).tolist() == [5]


def test_which_samples_of_a_class_are_held_out_is_random():
    """Over many seeds each sample of a class is drawn as often as any other."""
    labels = np.array([0] * 6 + [1] * 4)
    drawn = np.zeros(10)
    for seed in range(400):
        drawn[held_out(labels, 0.5, seed)] += 1
    assert np.all(np.abs(drawn / 400 - 0.5) < 0.1)


@pytest.mark.parametrize("targets", [np.linspace(0, 1, 40), np.zeros((40, 3), np.int64)])
def test_targets_that_are_no_labels_are_drawn_plainly(targets):
    held = held_out(targets, 0.25, 0)
    assert len(held) == 10
    assert held.tolist() == sorted({*held.tolist()}) != held_out(targets, 0.25, 1).tolist()


@pytest.mark.parametrize(("share", "message"), [(0.01, "0.01 of 30 training samples are 0"), (0.99, "are 30")])
def test_both_parts_need_a_sample(share, message):
    with pytest.raises(UserError, match=message):
        held_out(np.zeros(30, np.int64), share, 0)


def test_every_client_needs_a_sample():
    with pytest.raises(UserError, match="validation: client 1 has no sample left to train on; hold out a smaller"):
        without([np.array([0, 1, 2]), np.array([3, 4])], np.array([3, 4]))
    with pytest.raises(UserError, match="validation: client 1 has no sample left"):
        without([np.array([0, 1, 2]), np.array([], np.int64)], np.array([1]))


def test_holding_out_does_not_take_longer_with_more_clients():
    """Each client's part was compared with all samples held out: nearly three minutes."""
    parts = np.split(np.random.default_rng(0).permutation(600_000), 10_000)
    held, started = np.arange(0, 600_000, 10), time.process_time()
    left = without(parts, held)
    assert time.process_time() - started < 20
    assert sorted(np.concatenate(left)) == [i for i in range(600_000) if i % 10]
    assert left[7].tolist() == [i for i in parts[7] if i % 10]


def test_clients_keep_their_samples_but_those_held_out():
    keys = {**SMALL, "validation": 0.2, "partition_seed": 1}
    config = resolve(keys)
    held = held_out(DIGITS.y_train, 0.2, 1)
    parts = build([config], DIGITS, "cpu").federations[0].samples.parts
    whole = partition.clients_of(DIGITS, config.partition, config.clients, seed=1)
    assert [p.tolist() for p in parts] == [[i for i in part if i not in {*held}] for part in whole]
    chosen = select_samples(FinishedRun(None, config, {}, "fp32"), DIGITS, None)
    assert chosen.chosen.tolist() == [i for i in range(len(DIGITS.y_train)) if i not in {*held}]
    assert [chosen.chosen[c].tolist() for c in chosen.clients] == [p.tolist() for p in parts]


def test_figures_are_of_the_part_and_the_test_set_is_not_looked_at():
    """With other test samples every record stays the same."""
    keys = {**SMALL, "rounds": 2, "validation": 0.25, "device": "cpu"}
    result = fedman.run(dataset=DIGITS, **keys)
    spoilt = replace(DIGITS, x_test=255 - DIGITS.x_test, y_test=DIGITS.y_test * 0 + 9)
    again = fedman.run(dataset=spoilt, **keys)
    drop = {"seconds"}
    assert [{k: v for k, v in r.items() if k not in drop} for r in result.rounds] == [
        {k: v for k, v in r.items() if k not in drop} for r in again.rounds
    ]
    held = held_out(DIGITS.y_train, 0.25, 0)
    seen = in_place_of_test(DIGITS, held)
    assert (seen.x_test == DIGITS.x_train[held]).all()
    assert (seen.y_test == DIGITS.y_train[held]).all()
    assert round(result.accuracy / 100 * len(held), 6) % 1 == 0
    assert result.summary["evaluated_on"] == "validation"
    assert result.summary["config"]["validation"] == 0.25
    assert "validation accuracy: all" in repr(result)
    plain = fedman.run(dataset=DIGITS, **{**keys, "validation": 0.0})
    assert "evaluated_on" not in plain.summary
    assert "validation" not in plain.summary["config"]


def test_runs_share_a_chunk_only_with_the_same_part():
    a, b = (resolve({**SMALL, "validation": share, "partition_seed": 1}) for share in (0.0, 0.1))
    c, d = (config.model_copy(update={"partition_seed": 2}) for config in (a, b))
    assert stack_key(a) == stack_key(c)
    assert stack_key(b) != stack_key(d)
    assert stack_key(b) == stack_key(b.model_copy(update={"seed": 3, "partition": "iid"}))
