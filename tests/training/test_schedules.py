"""The learning rate over the rounds."""

import math

import pytest

import fedman
from fedman.training.settings import Training
from tests.federations import SMALL


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({}, [0.8, 0.8 * 0.5, 0.8 * 0.25, 0.8 * 0.125]),
        ({"lr_schedule": "constant"}, [0.8] * 4),
        ({"lr_schedule": "cosine"}, [0.8, 0.4 * (1 + math.sqrt(0.5)), 0.4, 0.4 * (1 - math.sqrt(0.5))]),
        ({"lr_schedule": "constant", "warmup": 3}, [0.8 / 3, 1.6 / 3, 0.8, 0.8]),
        ({"warmup": 2}, [0.4, 0.8 * 0.5, 0.8 * 0.25, 0.8 * 0.125]),
        ({"lr_schedule": "cosine", "warmup": 4}, [0.2, 0.2 * (1 + math.sqrt(0.5)), 0.3, 0.4 * (1 - math.sqrt(0.5))]),
        ({"lr_schedule": "constant", "warmup": 1}, [0.8] * 4),
    ],
)
def test_rates(keys, rates):
    training = Training(lr=0.8, lr_decay=0.5, rounds=4, **keys)
    assert [training.rate(t) for t in range(4)] == pytest.approx(rates, rel=1e-14)


def test_the_rates_of_a_run_are_in_its_records():
    keys = {**SMALL, "rounds": 4, "lr": 0.2}
    result = fedman.run(**keys, lr_schedule="cosine", warmup=2)
    training = Training(lr=0.2, lr_schedule="cosine", warmup=2, rounds=4)
    assert [r["lr"] for r in result.rounds] == [training.rate(t) for t in range(4)]


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("lr_schedule", "linear", "should be 'decay', 'constant' or 'cosine'"),
        ("warmup", -1, "should be greater than or equal to 0"),
        ("warmup", 0.5, "should be a whole number"),
    ],
)
def test_schedules_that_are_not_there(key, value, wanted):
    with pytest.raises(fedman.UserError, match=f"^{key}: {wanted}"):
        fedman.run(**SMALL, **{key: value})
