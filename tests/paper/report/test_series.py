"""Seeds of a setting: means, spreads, curves; what makes a series of its own."""

import math

import pytest

from fedman.paper.report.series import left_out, series
from tests.paper.report.report_rows import row


def test_mean_and_deviation_over_seeds():
    (one,) = series([row(a, zeta=0, seed=i) for i, a in enumerate((40.0, 41.0, 43.0))])
    assert one.mean == pytest.approx(124 / 3)
    assert one.std == pytest.approx(math.sqrt(7 / 3))
    assert one.curve.mean[-1] == pytest.approx(124 / 3)
    assert (one.curve.low[-1], one.curve.high[-1]) == (40.0, 43.0)


def test_one_seed_in_two_precisions_is_not_two_seeds():
    rows = [row(40.0, zeta=0), row(42.0, zeta=0, seed=1), row(50.0, zeta=0, precision="tf32")]
    rows[2]["config"]["precision"] = "tf32"
    assert [(s.variant, s.values) for s in series(rows)] == [("", [40.0, 42.0]), ("precision=tf32", [50.0])]


def test_a_diverged_run_is_a_seed_of_its_setting():
    """It has no precision on record, which does not make it a variant."""
    (one,) = series([row(40.0, zeta=0), row(math.nan, zeta=0, seed=1)])
    assert [math.isnan(a) for a in one.values] == [False, True]
    assert one.variant == ""


def test_runs_of_the_same_setting_and_seed_are_named_where_they_are_left_out():
    rows = [row(40.0, zeta=0, execution=how) for how in ("plain", "vmap", "kernels")]
    rows.append(row(41.0, zeta=0, seed=1, target=30))
    shown = series(rows)
    assert [s.seeds for s in shown] == [[0, 1]]
    said = "2 runs are not shown: others have the same setting and seed, apart from execution."
    assert left_out(rows, shown) == [said]
    assert left_out(rows[2:], series(rows[2:])) == []
    plain = [row(40.0, zeta=0, penalty=penalty) for penalty in ("man", "feddecorr")]
    assert left_out(plain, series(plain)) == [], "with ζ = 0 these are the same run"
