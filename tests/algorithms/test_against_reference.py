"""Each algorithm against its slow reference: several rounds, MAN on, the clip active, ragged cohorts."""

import numpy as np
import pytest
import torch

from fedman.algorithms import ALGORITHMS
from fedman.execution.vmapped import Vmapped
from fedman.models.parameters import flatten
from tests.cases import CASES
from tests.federations import COHORTS, SIZES, TRAINING, batches, network, play, samples, simulation
from tests.reference import SIZES as PARAMETER_SIZES
from tests.reference import federate, objective

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def expected(name, hyper, data, training=TRAINING):
    return federate(
        name, hyper, flatten(network()).numpy(), SIZES, COHORTS, batches(data, training),
        zeta=training.zeta, lr=training.lr, lr_decay=training.lr_decay, decay=training.weight_decay, C=training.clip,
    )  # fmt: skip


def test_every_algorithm_has_a_case():
    assert {name for name, _ in CASES.values()} == set(ALGORITHMS)


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference(case, chunk):
    name, hyper = CASES[case]
    data = samples()
    machine = simulation(name, hyper, data=data, chunk=chunk)
    state, outcomes = play(machine)
    want = expected(name, hyper, data)
    for model, w in machine.federation.models(state).items():
        np.testing.assert_allclose(w.numpy(), want[model], err_msg=model, **CLOSE)
    np.testing.assert_allclose(state.clients.last.numpy(), want["x"], **CLOSE)
    for key, table in (("h", "h"), ("g", "g_k"), ("c", "c_k")):
        if key in state.clients.memory:
            np.testing.assert_allclose(state.clients.memory[key].numpy(), want[table], **CLOSE)
    for key in ("g", "c"):
        if key in state.server:
            np.testing.assert_allclose(state.server[key].numpy(), want[key], **CLOSE)
    assert [o.cohort for o in outcomes] == COHORTS


def test_the_clip_acts_in_these_tests():
    """The battery would prove little if the clip never bound; without it the models differ."""
    from dataclasses import replace

    loose = simulation("fedavg", training=replace(TRAINING, clip=1e9))
    tight = simulation("fedavg")
    a, b = play(loose)[0], play(tight)[0]
    assert (a.server["w"] - b.server["w"]).norm() > 1e-2


def test_the_reference_gradient_is_right():
    """The hand-written backpropagation against finite differences and against autograd through the module."""
    data, w = samples(), flatten(network()).numpy()
    x, y = data.x[:6].numpy(), data.y[:6].numpy()
    value, gradient, ce = objective(w, x, y, 0.7)
    step = 1e-6
    for i in range(0, len(w), 5):
        up, down = w.copy(), w.copy()
        up[i] += step
        down[i] -= step
        difference = (objective(up, x, y, 0.7)[0] - objective(down, x, y, 0.7)[0]) / (2 * step)
        assert difference == pytest.approx(gradient[i], rel=1e-6, abs=1e-9)
    stacked = Vmapped(network())
    assert stacked.parameters.sizes == PARAMETER_SIZES
    batch = torch.tensor(x)[None], torch.tensor(y)[None], None
    ours, loss = stacked.gradient(torch.tensor(w)[None], *batch, 0.7)
    np.testing.assert_allclose(ours[0].numpy(), gradient, **CLOSE)
    assert loss.item() == pytest.approx(ce, rel=1e-12)
    assert value == pytest.approx(
        ce + 0.7 * sum(v.item() for v in stacked.man_terms(torch.tensor(w)[None], *batch).values())
    )
