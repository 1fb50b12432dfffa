"""Every algorithm on every backend and execution against the same expected values: the float64 reference loop.

Backends: a run alone, in chunks of several sizes; a run stacked with two others; Flower, with real messages. The GPU's
kernels serve convolutional networks alone and have a battery of their own (tests/kernels).
"""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from fedman.execution.one_by_one import OneByOne
from fedman.execution.vmapped import Vmapped
from fedman.models.parameters import flatten
from fedman.training.client_rows import ClientRows
from tests.cases import CASES
from tests.federations import COHORTS, TRAINING, batches, network, play, samples, simulation, together
from tests.reference import federate

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def expected(name, hyper, data, cohorts, training=TRAINING):
    """The models, the tables of clients and the server's vectors after these rounds."""
    return federate(
        name, hyper, flatten(network()).numpy(), data.sizes(range(len(data.parts))), cohorts, batches(data, training),
        zeta=training.zeta, lr=training.lr, lr_decay=training.lr_decay, decay=training.weight_decay, C=training.clip,
    )  # fmt: skip


def check(federation, state, want):
    for model, w in federation.models(state).items():
        np.testing.assert_allclose(w.numpy(), want[model], err_msg=model, **CLOSE)
    assert isinstance(state.clients, ClientRows)
    np.testing.assert_allclose(state.clients.last.numpy(), want["x"], **CLOSE)
    for key, table in state.clients.memory.items():
        np.testing.assert_allclose(table.numpy(), want["clients"][key], err_msg=key, **CLOSE)
    for key, vector in state.server.items():
        if key in want["server"]:  # sums of what the clients remember and the server's model are compared above
            np.testing.assert_allclose(vector.numpy(), want["server"][key], err_msg=key, **CLOSE)


@pytest.mark.parametrize(("execution", "chunk"), [(OneByOne, 2), (Vmapped, 1), (Vmapped, 2), (Vmapped, 100)])
@pytest.mark.parametrize("case", CASES)
def test_a_run_alone(case, chunk, execution):
    name, hyper = CASES[case]
    data = samples()
    machine = simulation(name, hyper, data=data, chunk=chunk, execution=execution)
    state, outcomes = play(machine)
    check(machine.federation, state, expected(name, hyper, data, COHORTS))
    assert [o.cohort for o in outcomes] == COHORTS


@pytest.mark.parametrize("execution", [OneByOne, Vmapped])
@pytest.mark.parametrize("case", CASES)
def test_a_run_stacked_with_others(case, execution):
    name, hyper = CASES[case]
    data = samples()
    trainings = [TRAINING, replace(TRAINING, seed=1, zeta=0.0), replace(TRAINING, seed=2)]
    runs = [simulation(name, hyper, data=data, training=t, longest=20, execution=execution) for t in trainings]
    states = [run.start() for run in runs]
    for cohort in COHORTS:
        together(runs, states, [cohort] * 3)
    for run, state, training in zip(runs, states, trainings, strict=True):
        check(run.federation, state, expected(name, hyper, data, COHORTS, training))


@pytest.mark.parametrize(  # in chunks of 1 one by one, else vmapped; an option of an algorithm vmapped alone
    ("case", "chunk"), [(case, chunk) for case in CASES for chunk in (1, 100) if "," not in case or chunk > 1]
)
def test_a_run_on_flower(case, chunk, tmp_path, monkeypatch):
    """Clients with samples of their own behind real messages; the model is the reference's network."""
    pytest.importorskip("flwr")
    from tests.flower.local_grid import serve_samples

    name, hyper = CASES[case]
    data = samples([13, 7, 20])
    data = replace(data, x=data.x.float().double())  # files of numbers are float32
    everyone = [[0, 1, 2]] * 3
    keys = {f.name: getattr(TRAINING, f.name) for f in fields(TRAINING)} | {"rounds": len(everyone), "chunk": chunk}
    result = serve_samples(data, network, {"algorithm": name, **hyper, **keys}, tmp_path, monkeypatch)
    want = expected(name, hyper, data, everyone)
    for model, parameters in result.models.items():
        w = torch.cat([v.flatten() for v in parameters.values()])
        np.testing.assert_allclose(w.numpy(), want[model], err_msg=model, **CLOSE)
