"""Grids of runs: combinations, names, hyper-parameters of several algorithms, parts of a named sweep."""

import pytest

from fedman.algorithms import ALGORITHMS
from fedman.config import Preset
from fedman.errors import UserError
from fedman.runs.grid import Grid, Sweep, cells

BASE = Preset({"rounds": 7, "zeta": 0.2})
SWEEP = Sweep(
    "mine",
    (
        Grid(BASE, {"algorithm": ("fedavg", "fedsam"), "seed": ("0", "1")}),
        Grid(BASE, {"algorithm": ("fedsam",), "seed": ("0",), "rho": ("0.3",)}),
    ),
)


def test_combinations_of_comma_lists_on_top_of_a_preset():
    grid = cells({"algorithm": "fedavg,feddc", "seed": "0,1", "lr": "0.1"}, BASE)
    assert [cell.name for cell in grid] == ["fedavg-seed0", "fedavg-seed1", "feddc-seed0", "feddc-seed1"]
    assert {(cell.config.rounds, cell.config.zeta, cell.config.lr) for cell in grid} == {(7, 0.2, 0.1)}
    assert [cell.name for cell in cells({})] == ["run"]


def test_lists_of_a_file_and_values_that_are_no_text():
    assert [cell.config.seed for cell in cells({"seed": [3, 4], "rounds": 2})] == [3, 4]


def test_a_hyperparameter_is_given_to_the_algorithms_that_have_it():
    grid = cells({"algorithm": "fedavg,feddyn,fedsam", "alpha": "0.1,0.2"})
    assert {cell.name: cell.config.hyper for cell in grid} == {
        "fedavg": {},
        "feddyn-alpha0.1": {"alpha": 0.1},
        "feddyn-alpha0.2": {"alpha": 0.2},
        "fedsam": {"rho": 0.05},
    }


TWO = ("fedsam", "fedasam", "fedspeed", "mofedsam", "fedgamma", "fedsmoo", "fedgloss")
"""Algorithms that take two gradients a step."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_cost_counts_gradients(name):
    (cell,) = cells({"algorithm": name, "rounds": "10"})
    assert cell.cost == 10 * (2 if name in TWO else 1)


def test_a_named_sweep_and_parts_of_it():
    assert [cell.name for cell in cells({}, SWEEP)] == [
        "fedavg-seed0",
        "fedsam-seed0",
        "fedsam-seed0-rho0.3",
        "fedavg-seed1",
        "fedsam-seed1",
    ]
    assert [cell.name for cell in cells({"rho": "0.30"}, SWEEP)] == ["fedsam-seed0-rho0.3"]
    assert [cell.name for cell in cells({"rho": "0.05", "seed": "5"}, SWEEP)] == ["fedsam-seed5"]
    assert {cell.config.lr for cell in cells({"lr": "0.7"}, SWEEP)} == {0.7}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rho": "0.4"}, r"rho: 0.4 is no part of mine; it has 0.05, 0.3"),
        ({"rho": "-1"}, "rho: should be greater than or equal to 0"),
        ({"rho": "x"}, "rho: should be a number"),
        ({"algorithm": "fedavg", "rho": "0.3"}, "mine: none of its runs has algorithm=fedavg rho=0.3 together"),
        ({"mu": "0.1"}, "mu: fedavg has no such hyper-parameter"),
        ({"zetta": "1"}, r"zetta: no such key; did you mean zeta\?"),
    ],
)
def test_keys_that_choose_nothing(keys, message):
    with pytest.raises(UserError, match=f"^{message}"):
        cells(keys, SWEEP)


def test_two_runs_of_one_name_are_refused():
    one, other = Grid(Preset({"rounds": 3}), {"zeta": ("0",)}), Grid(Preset({"rounds": 4}), {"zeta": ("0",)})
    assert len(cells({}, Sweep("twice", (one, one)))) == 1
    with pytest.raises(UserError, match=r"^two: two different runs would be called zeta0$"):
        cells({}, Sweep("two", (one, other)))


def test_values_that_would_share_a_folder_are_refused():
    """A run that would be dropped without a word: a folder's name has _ for / and for :."""
    with pytest.raises(UserError, match=r"^sweep: two different runs would be called modelm_x_build-seed0; rename"):
        cells({"model": "m_x:build,m:x_build", "seed": "0,1"})
