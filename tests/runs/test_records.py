"""What is read back is checked field by field, and kept as it is."""

import json
import math

import pytest

from fedman.errors import UserError
from fedman.runs.records import Finite, axes, check, check_row, decisive, differing, parse
from tests.runs.run_records import ROW


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": None}, "config should be a JSON object, not None"),
        ({"config": {"dataset": "d"}}, "config.partition is missing"),
        ({"config": ROW["config"] | {"zeta": "much"}}, "config.zeta should be a valid number, not 'much'"),
        ({"accuracy": {}}, "accuracy: all is missing"),
        ({"accuracy": {"sel": 40.0}}, "accuracy: all is missing"),
        ({"accuracy": {"cloud": 1e308}}, "accuracy.cloud should be less than or equal to 100"),
        ({"accuracy": {"all": 1e308}}, "accuracy.all should be less than or equal to 100"),
        ({"seconds": 1e308}, "seconds should be less"),
        ({"accuracy": {"all": float("nan")}}, "accuracy.all"),
        ({"accuracy": {"all": True}}, "accuracy.all"),
        ({"rounds_to_target": "soon"}, "rounds_to_target"),
        ({"curve": {"round": [1], "all": [40.0, 50.0]}}, "curve must hold as many"),
        ({"curve": {"round": [1, 2], "all": [40.0, "x"]}}, "curve.all.1 should be a valid number"),
        ({"curve": {"round": [1, 10**400], "all": [40.0, 50.0]}}, "curve.round.1 should be less"),
        ({"curve": []}, "curve should be a JSON object"),
        ({"device": "\ud800"}, "not JSON"),
    ],
)
def test_rows_that_are_no_results(change, message):
    check_row(parse(json.dumps(ROW), "f"), "f")
    with pytest.raises(UserError, match=rf"^f: line 2: [^\n]*{message}[^\n]*$"):
        check_row(parse(json.dumps(ROW | change), "f: line 2"), "f: line 2")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "1", None, [1.0]])
def test_finite_numbers(value):
    assert check(Finite, 1e308, "f") == 1e308
    with pytest.raises(UserError, match=r"^f: should be "):
        check(Finite, value, "f")


def test_what_decides_a_result():
    one = {"seed": 0, "lr": 0.1, "data_dir": "a", "checkpoint_seconds": 1.0, "log": "wandb", "tensorboard": True}
    assert decisive(one) == {"seed": 0, "lr": 0.1}
    assert differing(decisive(one), {"seed": 1, "rho": 0.5, "lr": 0.1}) == ["rho", "seed"]
    assert axes(ROW)["clients"] == 3
