"""The registry: names, titles, hyper-parameters with their defaults, what is averaged how."""

from dataclasses import fields

import pytest
import torch

from fedman import algorithms
from fedman.algorithms import ALGORITHMS, Local, hyperparameters
from fedman.training.check_parts import check_algorithm

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
    "fedavgm": ("FedAvgM", {"server_momentum": 0.9, "server_lr": 1.0}, False),
    "fedadam": ("FedAdam", {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}, False),
    "fedcm": ("FedCM", {"alpha": 0.1}, False),
    "mofedsam": ("MoFedSAM", {"alpha": 0.1, "rho": 0.1}, False),
    "fedgamma": ("FedGAMMA", {"decayed": True, "rho": 0.1}, False),
    "fedsmoo": ("FedSMOO", {"alpha": 0.1, "rho": 0.1, "mu_alone": False}, False),
    "fedlesam": ("FedLESAM", {"rho": 0.1, "last_round": False}, False),
    "fedlesam-d": ("FedLESAM-D", {"alpha": 0.1, "rho": 0.1, "last_round": False}, False),
    "fedacg": ("FedACG", {"mu": 1e-3, "server_momentum": 0.85}, False),
    "fedgloss": ("FedGloSS", {"alpha": 0.01, "rho": 0.01, "rho_local": 0.05, "state_scale": 1.0}, False),
}


def test_every_algorithm_is_in_the_table():
    assert set(ALGORITHMS) == set(TABLE)
    assert all(hasattr(algorithms, name) for name in algorithms.__all__)


@pytest.mark.parametrize("name", TABLE)
def test_title_defaults_and_weighting(name):
    title, defaults, weighted = TABLE[name]
    assert hyperparameters(ALGORITHMS[name]) == defaults
    assert (ALGORITHMS[name].title, ALGORITHMS[name].weighted) == (title, weighted)
    made = ALGORITHMS[name]()
    assert {key: getattr(made, key) for key in defaults} == defaults
    with pytest.raises(AttributeError):
        made.title = "changed"  # frozen


@pytest.mark.parametrize("name", TABLE)
def test_every_hyperparameter_has_a_description_and_bounds(name):
    shares = {"server_momentum", "beta1", "beta2"} | ({"alpha"} if name in ("fedcm", "mofedsam") else set())
    for field in fields(ALGORITHMS[name]):
        bounds = {"ge": 1e-16 if field.name == "tau" else 0} | ({"le": 1} if field.name in shares else {})
        metadata = dict(field.metadata)
        assert metadata.pop("description")
        assert metadata == ({} if isinstance(field.default, bool) else bounds)


@pytest.mark.parametrize("name", TABLE)
def test_returns_what_it_must(name):
    algorithm = ALGORITHMS[name]()
    assert check_algorithm(algorithm) is algorithm


def test_whose_formulas_presume_sgd_and_whose_model_is_not_the_one_sent():
    found = {name for name in TABLE if ALGORITHMS[name].presumes_sgd}
    assert found == {"feddc", "scaffold", "fedcm", "mofedsam", "fedgamma"}
    assert {name for name in TABLE if ALGORITHMS[name].cloud != "w"} == {"fedacg", "fedgloss"}


def test_what_a_server_may_expect_of_an_honest_client():
    """Weight decay beside λ, and the norm of uploads beside the model, which by default is how far the model gets."""
    decays = {name: ALGORITHMS[name]().extra_decay(2.0) for name in TABLE}
    alphas = {"feddyn": 0.005, "fedspeed": 0.005, "fedsmoo": 0.05, "fedlesam-d": 0.05}
    assert decays == {name: alphas.get(name, 0.0) for name in TABLE}
    norms = {name: ALGORITHMS[name]().upload_norm(5.0, 30) for name in TABLE}
    assert norms == {name: 6.0 if name == "fedsmoo" else 5.0 for name in TABLE}


@pytest.mark.parametrize("name", TABLE)
def test_gradients_per_step_is_the_number_of_calls_of_grad(name):
    """A step on a quadratic, one client of three parameters."""
    algorithm, w, calls = ALGORITHMS[name](), torch.ones(1, 3), []

    def grad(at):
        calls.append(at)
        return at

    one = torch.ones(1, 1)
    hp = Local(lr=torch.tensor(0.1), lr0=0.1, decay=0.0, clip=10.0, p=one, steps=one, is_weight=torch.ones(3) > 0)
    server = {key: torch.zeros(3) for key in algorithm.server}
    client = {key: torch.zeros(1, 3) for key in algorithm.client}
    client |= algorithm.begin(server, client, hp)
    algorithm.step(w, grad, server, client, hp)
    assert len(calls) == algorithm.gradients_per_step
