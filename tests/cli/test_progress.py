"""The line that says how long it will take."""

import pytest

from fedman.cli import progress

RECORD = {"accuracy": {"all": 40.0}, "loss": 1.0, "quarantined": []}


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_time_left_counts_the_work_that_is_left(clock, capsys):
    """Runs 1 and 3 of four are left, ten rounds each, the second at twice the cost: 30 units at 2 s."""
    with progress.sweep_progress({1: ("fedavg", 10, 10.0), 3: ("fedsam", 10, 20.0)}, 4) as (advance, other):
        for t in range(1, 11):
            clock[0] = 2.0 * t
            advance(RECORD | {"round": t})
        said = capsys.readouterr().err.splitlines()
        assert said[0] == "[2/4] fedavg round 5/10 loss 1.000 40.00 % 50 s left"
        assert said[-1] == "[2/4] fedavg round 10/10 loss 1.000 40.00 % 40 s left"
        clock[0] = 24.0 + 10
        other(RECORD | {"round": 6})  # resumed after round 5: one round of work since the start, four to come
    assert "round 6/10" in capsys.readouterr().err


def test_the_first_round_does_not_count(clock, capsys):
    """Three stacked runs: a first round of a minute, with kernels to compile, and then two seconds a round."""
    with progress.sweep_progress({i: (f"run {i}", 100, 100.0) for i in range(3)}, 3) as advance:
        for t in range(1, 101):
            clock[0] = 60.0 + 2.0 * (t - 1)
            for each in advance:
                each(RECORD | {"round": t})
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "[1/3] run 0 round 1/100 loss 1.000 40.00 %", "nothing to go by yet"
    assert said[1].endswith("round 6/100 loss 1.000 40.00 % 3 min 09 s left")
    assert said[-1] == "[3/3] run 2 round 100/100 loss 1.000 40.00 % 0 s left"


def test_durations():
    said = [progress.duration(seconds) for seconds in (0.4, 59.6, 3599, 7500)]
    assert said == ["0 s", "1 min 00 s", "59 min 59 s", "2 h 05 min"]
