"""What the battery (tests/backends) rests on: a case for every algorithm, a clip that acts, a right gradient."""

import numpy as np
import pytest
import torch

from fedman.algorithms import ALGORITHMS
from fedman.execution.base import Batch
from fedman.execution.vmapped import Vmapped
from fedman.models.parameters import flatten
from tests.cases import CASES
from tests.federations import PENALTY, TASK, TRAINING, network, play, samples, simulation
from tests.reference import SIZES as PARAMETER_SIZES
from tests.reference import objective

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def test_every_algorithm_has_a_case():
    assert {name for name, _ in CASES.values()} == set(ALGORITHMS)


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
    stacked = Vmapped(network(), TASK, PENALTY)
    assert stacked.parameters.sizes == PARAMETER_SIZES
    batch = Batch(torch.tensor(x)[None], torch.tensor(y)[None])
    ours, loss, _ = stacked.gradient(torch.tensor(w)[None], batch, 0.7)
    np.testing.assert_allclose(ours[0].numpy(), gradient, **CLOSE)
    assert loss.item() == pytest.approx(ce, rel=1e-12)
    assert value == pytest.approx(
        ce + 0.7 * sum(v.item() for v in stacked.penalty_terms(torch.tensor(w)[None], batch).values())
    )
