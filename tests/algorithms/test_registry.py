"""The registry: names, titles, hyper-parameters with their defaults, what is averaged how."""

import pytest

from fedman import algorithms
from fedman.algorithms import ALGORITHMS, hyperparameters

TABLE = {
    # name: title, hyper-parameters, averaged by sample counts
    "fedavg": ("FedAvg", {}, True),
    "fedprox": ("FedProx", {"mu": 1e-4}, True),
    "fedsam": ("FedSAM", {"rho": 0.05}, True),
    "fedasam": ("FedASAM", {"rho": 0.5, "eta": 0.2}, True),
    "feddyn": ("FedDyn", {"alpha": 0.01}, False),
    "feddc": ("FedDC", {"alpha": 0.01, "decayed": False}, False),
    "fedspeed": ("FedSpeed", {"alpha": 0.01, "rho": 0.1, "stale_ascent": False}, False),
    "scaffold": ("SCAFFOLD", {"decayed": False}, False),
}


def test_every_algorithm_is_in_the_table():
    assert set(ALGORITHMS) == set(TABLE)
    assert all(hasattr(algorithms, name) for name in algorithms.__all__)


@pytest.mark.parametrize("name", TABLE)
def test_title_defaults_and_weighting(name):
    title, defaults, weighted = TABLE[name]
    assert hyperparameters(name) == defaults
    assert (ALGORITHMS[name].title, ALGORITHMS[name].weighted) == (title, weighted)
    made = ALGORITHMS[name]()
    assert {key: getattr(made, key) for key in defaults} == defaults
    with pytest.raises(AttributeError):
        made.title = "changed"  # frozen
