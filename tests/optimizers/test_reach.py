"""How far an honest client can get: what the server on Flower accepts must never be less."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedman.optimizers import SGD, Adam, AdamW
from tests.optimizers.test_against_torch import Rates

SIZE = 6
numbers = st.floats(0.0, 0.95)
OPTIMIZERS = st.one_of(
    st.builds(SGD, momentum=numbers, nesterov=st.booleans(), decay_inside=st.booleans()),
    st.builds(Adam, adam_beta1=numbers, adam_beta2=st.floats(0.5, 0.999)),
    st.builds(AdamW, adam_beta1=numbers, adam_beta2=st.floats(0.5, 0.999)),
)
DRIVES = {
    "towards zero and beyond": lambda w, theta, j: w if j == 0 else theta,
    "outwards": lambda w, theta, j: -w,
    "away from the start": lambda w, theta, j: theta - w + 1e-3,
    "along one axis": lambda w, theta, j: torch.eye(SIZE, dtype=w.dtype)[:1],
    "ever harder": lambda w, theta, j: theta * 1.1**j,
    "out and back": lambda w, theta, j: w * (1 if j % 10 > 5 else -1),
    "back and forth": lambda w, theta, j: theta * (-1) ** (j // 3),
}


def drive(optimizer, theta, steps, rates, how, scale, state=None):
    """The model after these steps along gradients of any size, and the optimiser's state."""
    w, state = theta, optimizer.init(theta) if state is None else state
    for j in range(steps):
        w, state = optimizer.update(w, scale * DRIVES[how](w, theta, j), state, rates)
    return w, state


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    optimizer=OPTIMIZERS,
    how=st.sampled_from(sorted(DRIVES)),
    scale=st.sampled_from([1e-3, 1.0, 1e6]),
    norm=st.floats(0.01, 20.0),
    lr=st.floats(1e-4, 0.3),
    clip=st.sampled_from([0.1, 10.0]),
    decay=st.sampled_from([0.0, 1e-3, 0.1, 1.0]),
    steps=st.integers(1, 30),
    rounds=st.integers(1, 3),
)
def test_no_honest_client_gets_further(optimizer, how, scale, norm, lr, clip, decay, steps, rounds):
    """Driven as hard as it can be, also with a state kept from earlier rounds."""
    theta = torch.linspace(-1, 2, SIZE, dtype=torch.float64)[None]
    theta = norm * theta / theta.norm()
    rates, state = Rates(torch.tensor(lr, dtype=torch.float64), decay, clip), None
    bound = optimizer.reach(norm, steps, SIZE, lr, clip, decay)
    for _ in range(rounds):
        w, state = drive(optimizer, theta, steps, rates, how, scale, state)
        assert (w - theta).norm().item() <= bound * (1 + 1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_reach_of_sgd_is_no_more_than_needed(momentum, nesterov):
    """With a velocity from many steps a round of full steps comes close to it."""
    optimizer, theta = SGD(momentum=momentum, nesterov=nesterov), torch.ones(1, SIZE, dtype=torch.float64)
    rates = Rates(torch.tensor(0.1, dtype=torch.float64), 0.0, 2.0)
    _, state = drive(optimizer, theta, 300, rates, "along one axis", 1e9)
    w, _ = drive(optimizer, theta, 5, rates, "along one axis", 1e9, state)
    bound = optimizer.reach(theta.norm().item(), 5, SIZE, 0.1, 2.0, 0.0)
    assert 0.999 * bound < (w - theta).norm().item() <= bound * (1 + 1e-9)


def test_a_step_of_sgd_towards_zero_reaches_its_bound():
    theta = torch.full((1, SIZE), 2.0, dtype=torch.float64)
    norm = theta.norm().item()
    for optimizer in (SGD(), SGD(momentum=0.9)):
        w, _ = drive(optimizer, theta, 1, Rates(torch.tensor(0.1).double(), 0.3, 2.0), "towards zero and beyond", 1e9)
        assert (w - theta).norm().item() == pytest.approx(0.1 * (2.0 + 0.3 * norm), rel=1e-6)
    assert SGD().reach(norm, 1, SIZE, 0.1, 2.0, 0.3) == pytest.approx(0.1 * (2.0 + 0.3 * norm))


def test_the_reach_of_adam_is_no_more_than_needed():
    """Gradients that grow by β₂/β₁ from step to step make m̂/√v̂ as large as Cauchy's inequality allows."""
    optimizer = Adam(adam_beta1=0.9, adam_beta2=0.99, adam_eps=1e-16)
    rates = Rates(torch.tensor(0.1, dtype=torch.float64), 0.0, math.inf)
    w = torch.zeros(1, SIZE, dtype=torch.float64)
    state = optimizer.init(w)
    for j in range(400):
        before = w
        w, state = optimizer.update(w, torch.full_like(w, (0.99 / 0.9) ** j), state, rates)
    bound = optimizer.reach(0.0, 1, SIZE, 0.1, math.inf, 0.0)
    assert 0.99 * bound < (w - before).norm().item() <= bound * (1 + 1e-9)


def test_no_bound_where_there_is_none():
    assert SGD().reach(1.0, 5, SIZE, 0.1, math.inf, 0.0) == math.inf
    assert SGD(momentum=0.9).reach(1.0, 5, SIZE, 0.1, math.inf, 0.0) == math.inf
    assert Adam(adam_beta1=0.9, adam_beta2=0.8).reach(1.0, 5, SIZE, 0.1, 1.0, 0.0) == math.inf
    assert Adam().reach(1.0, 5, SIZE, 0.1, math.inf, 0.0) < math.inf  # whatever the gradients
