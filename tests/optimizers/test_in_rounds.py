"""Optimisers inside a federation: their state kept or new in every round, against a plain loop over `torch.optim`.

Ragged clients, ragged cohorts, a clip that acts, in float64, on every backend.
"""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn

import fedman
from fedman.execution.one_by_one import OneByOne
from fedman.execution.vmapped import Vmapped
from fedman.models.parameters import flatten
from fedman.optimizers import SGD, Adam, AdamW
from tests.federations import (
    COHORTS,
    SIZES,
    SMALL,
    TRAINING,
    Loop,
    batches,
    network,
    play,
    samples,
    simulation,
    together,
)
from tests.reference import objective
from tests.runs.killed import run_killed

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
OPTIMIZERS = {
    "momentum": (SGD(momentum=0.9), lambda p, d: torch.optim.SGD([p], momentum=0.9, weight_decay=d)),
    "nesterov": (
        SGD(momentum=0.5, nesterov=True),
        lambda p, d: torch.optim.SGD([p], momentum=0.5, nesterov=True, weight_decay=d),
    ),
    "adam": (Adam(), lambda p, d: torch.optim.Adam([p], weight_decay=d)),
    "adamw": (AdamW(), lambda p, d: torch.optim.AdamW([p], weight_decay=d)),
}
HOW = {keep: replace(TRAINING, lr=0.05, keep_optimizer=keep, lr_schedule="cosine", rounds=6) for keep in (False, True)}


def loop(make, data, training, cohorts):
    """FedAvg: θ, and every client's last model."""
    theta, draw, kept = flatten(network()).double(), batches(data, training), {}
    last = theta.expand(len(SIZES), -1).clone()
    for t, cohort in enumerate(cohorts):
        for k in cohort:
            if k not in kept or not training.keep_optimizer:
                p = nn.Parameter(theta.clone())
                kept[k] = p, make(p, training.weight_decay)
            p, optimiser = kept[k]
            p.data = theta.clone()
            optimiser.param_groups[0]["lr"] = training.rate(t)
            for x, y in draw(t, k):
                p.grad = torch.tensor(objective(p.detach().numpy(), x, y, training.zeta)[1])
                nn.utils.clip_grad_norm_([p], training.clip)
                optimiser.step()
            last[k] = p.data
        n = torch.tensor([SIZES[k] for k in cohort], dtype=torch.float64)[:, None]
        theta = (n * last[cohort]).sum(0) / n.sum()
    return theta, last


@pytest.mark.parametrize(("execution", "chunk"), [(OneByOne, 1), (Vmapped, 2), (Vmapped, 100)])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_alone(name, keep, execution, chunk):
    optimizer, make = OPTIMIZERS[name]
    data = samples()
    state, _ = play(simulation(optimizer=optimizer, training=HOW[keep], data=data, chunk=chunk, execution=execution))
    theta, last = loop(make, data, HOW[keep], COHORTS)
    torch.testing.assert_close(state.server["w"], theta, **CLOSE)
    torch.testing.assert_close(state.clients.last, last, **CLOSE)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_kept_state_matters(name):
    """The tests above could otherwise pass without it."""
    ends = [play(simulation(optimizer=OPTIMIZERS[name][0], training=HOW[keep]))[0] for keep in (False, True)]
    assert (ends[0].server["w"] - ends[1].server["w"]).norm() > 1e-3


@pytest.mark.parametrize("graphs", [None, Loop], ids=["threads", "graphs"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_runs(name, keep, graphs):
    """Three runs of other seeds and ζ in one chunk, as on a GPU."""
    optimizer, make = OPTIMIZERS[name]
    data = samples()
    trainings = [HOW[keep], replace(HOW[keep], seed=1, zeta=0.0), replace(HOW[keep], seed=2)]
    runs = [
        simulation(optimizer=optimizer, data=data, training=t, longest=20, graphs=graphs and graphs())
        for t in trainings
    ]
    states = [run.start() for run in runs]
    for cohort in COHORTS:
        together(runs, states, [cohort] * 3)
    for state, training in zip(states, trainings, strict=True):
        theta, last = loop(make, data, training, COHORTS)
        torch.testing.assert_close(state.server["w"], theta, **CLOSE)
        torch.testing.assert_close(state.clients.last, last, **CLOSE)


@pytest.mark.parametrize("keep", [False, True])
def test_on_flower(keep, tmp_path, monkeypatch):
    """Clients keep the optimiser's state on their own disks."""
    pytest.importorskip("flwr")
    from tests.flower.local_grid import serve_samples

    data = samples()
    data = replace(data, x=data.x.float().double())
    keys = {"optimizer": "adam", **{f.name: getattr(HOW[keep], f.name) for f in fields(HOW[keep])}, "rounds": 3}
    result = serve_samples(data, network, keys, tmp_path, monkeypatch)
    everyone = [list(range(len(SIZES)))] * 3
    theta, _ = loop(OPTIMIZERS["adam"][1], data, replace(HOW[keep], rounds=3), everyone)
    found = torch.cat([v.flatten() for v in result.models["cloud"].values()])
    np.testing.assert_allclose(found.numpy(), theta.numpy(), **CLOSE)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_resume_gives_the_same_bits(optimizer, tmp_path):
    """A checkpoint holds what clients keep of their optimisers."""
    keys = {**SMALL, "optimizer": optimizer, "lr": 0.01, "keep_optimizer": True, "checkpoint_seconds": 0.0}
    keys |= {"momentum": 0.9} if optimizer == "sgd" else {}
    whole = fedman.run(**keys)

    run_killed(3, **keys, out=tmp_path)
    again = fedman.run(**keys, out=tmp_path, resume=True)
    for model, parameters in whole.models.items():
        assert all(torch.equal(again.models[model][name], v) for name, v in parameters.items())


@pytest.mark.parametrize("algorithm", ["feddc", "scaffold"])
@pytest.mark.parametrize("keys", [{"optimizer": "adam"}, {"momentum": 0.5}, {"decay_inside": True}])
def test_formulas_that_presume_plain_sgd(algorithm, keys):
    with pytest.raises(fedman.UserError, match=f"^optimizer: the formulas of {algorithm} presume plain SGD; use"):
        fedman.run(**SMALL, algorithm=algorithm, **keys)
