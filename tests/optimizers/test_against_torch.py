"""Every local optimiser against `torch.optim`, client by client in float64; the clip is `clip_grad_norm_`."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedman.optimizers import OPTIMIZERS, SGD, Adam, AdamW, clip_factor
from fedman.optimizers.base import LocalOptimizer

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
CURVATURE = torch.linspace(0.2, 3.0, 7, dtype=torch.float64)
START = torch.tensor([[1.0], [-0.4], [3.0]], dtype=torch.float64) * torch.linspace(-1, 2, 7, dtype=torch.float64)


@dataclass(frozen=True)
class Rates:
    """What an optimiser reads of a round."""

    lr: torch.Tensor
    decay: float
    clip: float
    fused: None = None


def gradient(w):
    """Of a function that is not a quadratic; its norm lies on both sides of the bounds below."""
    return CURVATURE * w.sin() + 0.1 * w


def ours(optimizer, rates, steps, extra=0.0, w=START):
    state = optimizer.init(w)
    for _ in range(steps):
        w, state = optimizer.update(w, gradient(w), state, rates, extra)
    return w


def theirs(make, rates, steps, inside=False, w=START):
    """One `torch.optim` optimiser for each client."""
    rows = []
    for row in w:
        p = nn.Parameter(row.clone())
        optimiser = make(p, rates.lr.item(), 0.0 if inside else rates.decay)
        for _ in range(steps):
            p.grad = gradient(p.detach()) + (rates.decay * p.detach() if inside else 0)
            if rates.clip < math.inf:
                nn.utils.clip_grad_norm_([p], rates.clip)
            optimiser.step()
        rows.append(p.detach())
    return torch.stack(rows)


def sgd(**options):
    return lambda p, lr, decay: torch.optim.SGD([p], lr=lr, weight_decay=decay, **options)


def adam(kind, **options):
    return lambda p, lr, decay: kind([p], lr=lr, weight_decay=decay, **options)


BETAS = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-3}
PAIRS = {
    "plain": (SGD(), sgd(), False),
    "momentum": (SGD(momentum=0.9), sgd(momentum=0.9), False),
    "nesterov": (SGD(momentum=0.7, nesterov=True), sgd(momentum=0.7, nesterov=True), False),
    "decay inside": (SGD(decay_inside=True), sgd(), True),
    "momentum, decay inside": (SGD(momentum=0.9, decay_inside=True), sgd(momentum=0.9), True),
    "nesterov, decay inside": (
        SGD(momentum=0.9, nesterov=True, decay_inside=True), sgd(momentum=0.9, nesterov=True), True,
    ),
    "adam": (Adam(), adam(torch.optim.Adam), False),
    "adam, other numbers": (Adam(**BETAS), adam(torch.optim.Adam, betas=(0.8, 0.95), eps=1e-3), False),
    "adamw": (AdamW(), adam(torch.optim.AdamW), False),
    "adamw, other numbers": (AdamW(**BETAS), adam(torch.optim.AdamW, betas=(0.8, 0.95), eps=1e-3), False),
}  # fmt: skip


def test_every_optimiser_is_compared():
    assert {type(optimizer) for optimizer, _, _ in PAIRS.values()} == set(OPTIMIZERS.values())


@pytest.mark.parametrize("clip", [0.8, math.inf])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_steps_of_torch(pair, decay, clip):
    optimizer, make, inside = PAIRS[pair]
    rates = Rates(torch.tensor(0.07, dtype=torch.float64), decay, clip)
    for steps in (1, 2, 25):
        torch.testing.assert_close(ours(optimizer, rates, steps), theirs(make, rates, steps, inside), **CLOSE)


def test_the_cases_are_apart():
    """Clip, decay, and each option change the result: a test above could otherwise pass by chance."""
    rates = Rates(torch.tensor(0.07, dtype=torch.float64), 0.05, 0.8)
    ends = [ours(optimizer, rates, 25) for optimizer, _, _ in PAIRS.values()]
    ends += [ours(SGD(), Rates(rates.lr, 0.0, 0.8), 25), ours(SGD(), Rates(rates.lr, 0.05, math.inf), 25)]
    for i, one in enumerate(ends):
        for other in ends[:i]:
            assert (one - other).abs().max() > 1e-4


@pytest.mark.parametrize("pair", PAIRS)
def test_extra_decay_is_decay(pair):
    """A number for all clients, or a column with one for each."""
    optimizer = PAIRS[pair][0]
    lr = torch.tensor(0.07, dtype=torch.float64)
    want = ours(optimizer, Rates(lr, 0.07, 0.8), 9)
    column = torch.full((3, 1), 0.05, dtype=torch.float64)
    torch.testing.assert_close(ours(optimizer, Rates(lr, 0.02, 0.8), 9, 0.05), want, **CLOSE)
    torch.testing.assert_close(ours(optimizer, Rates(lr, 0.02, 0.8), 9, column), want, **CLOSE)
    column[1] = 0.5
    each = ours(optimizer, Rates(lr, 0.02, 0.8), 9, column)
    torch.testing.assert_close(each[[0, 2]], want[[0, 2]], **CLOSE)
    assert (each[1] - want[1]).abs().max() > 1e-3


@pytest.mark.parametrize("pair", PAIRS)
def test_an_update_writes_to_none_of_its_inputs(pair):
    optimizer = PAIRS[pair][0]
    rates = Rates(torch.tensor(0.07, dtype=torch.float64), 0.05, 0.8)
    w, g = START.clone(), gradient(START)
    state = optimizer.init(w)
    _, state = optimizer.update(w, g, state, rates)
    before = [v.clone() for v in (w, g, *state.values())]
    optimizer.update(w, g, state, rates)
    assert all(map(torch.equal, before, (w, g, *state.values())))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_state_has_a_row_for_every_client(pair):
    optimizer = PAIRS[pair][0]
    state = optimizer.init(START)
    assert all(len(v) == len(START) and v.dtype == START.dtype for v in state.values())
    assert set(optimizer.update(START, START, state, Rates(START.new_tensor(0.1), 0.0, 1.0))[1]) == set(state)


def test_what_formulas_presume():
    """FedDC and SCAFFOLD may read the mean gradient off the model's change."""
    plain = {name: optimizer.is_plain_sgd for name, (optimizer, _, _) in PAIRS.items()}
    assert [name for name, is_plain in plain.items() if is_plain] == ["plain"]


def test_an_optimiser_of_a_user_needs_an_update_alone():
    @dataclass(frozen=True)
    class Signs(LocalOptimizer):
        title = "signs"

        def update(self, w, g, state, hp, extra_decay=0.0):
            return w - hp.lr * g.sign(), state

    signs = Signs()
    assert (signs.init(START), signs.reach(1.0, 5, 7, 0.1, 1.0, 0.0), signs.is_plain_sgd) == ({}, math.inf, False)


def test_the_clip_of_a_row_is_its_own():
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    want = torch.tensor([[1 / (5 + 1e-6)], [1.0], [1.0]], dtype=torch.float64)
    torch.testing.assert_close(clip_factor(g, 1.0), want, **CLOSE)
