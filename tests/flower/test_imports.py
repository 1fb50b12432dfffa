"""A server can name only what a node's own configuration allows to be imported."""

from dataclasses import dataclass

import pytest

from fedman.algorithms import hyperparameter
from fedman.algorithms.fedavg import FedAvg
from fedman.config import resolve
from fedman.errors import TooFew, UserError
from fedman.flower.imports import check_imports
from fedman.flower.server import serve
from fedman.flower.server_options import ServerOptions
from tests.federations import SMALL
from tests.flower.local_grid import LocalGrid

NAME = "tests.flower.test_imports:Own"


@dataclass(frozen=True)
class Own(FedAvg):
    title = "Own"

    strength: float = hyperparameter(1.0, "a number")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("algorithm", NAME),
        ("task", "os:system"),
        ("penalty", "my.package:Penalty"),
        ("optimizer", "an-entry-point"),
        ("model", "my.package:build"),
        ("partition", "my.package:split"),
        ("partition", "file:/etc/passwd.json"),
    ],
)
def test_what_is_not_allowed_is_refused(key, name):
    with pytest.raises(UserError, match=f"{key}: the run names '{name}', which this node may not import"):
        check_imports({key: name}, ["another:Name"])
    check_imports({key: name}, ["another:Name", name])


def test_own_parts_need_no_permission():
    check_imports(resolve({"algorithm": "feddc", "partition": "dir0.6"}).flat(), ())


def test_a_node_works_with_the_algorithm_that_it_allows(tmp_path):
    config = resolve({**SMALL, "clients": 3, "participation": 1.0, "rounds": 1, "algorithm": NAME, "strength": 2.0})
    service = ServerOptions(wait=0.2, round_timeout=30.0, retries=0)
    grid = LocalGrid.of(3, tmp_path / "memory")
    with pytest.raises(TooFew, match="algorithm: the run names"):
        serve(grid, config, service, out=tmp_path / "refused", device="cpu")
    for node in grid.nodes.values():
        node["allow"] = f"some.other:Thing, {NAME}"
    assert serve(grid, config, service, out=tmp_path / "out", device="cpu").summary["method"] == "Own"
