"""A small federation for the tests: ragged clients, ragged cohorts, a clip that acts, in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fedman.algorithms import ALGORITHMS
from fedman.execution.stacked import Stacked
from fedman.models.mlp import MLP
from fedman.training.batches import Samples
from fedman.training.engine import Engine, Training
from fedman.training.randomness import plan

SIZES = [13, 7, 20, 9, 16, 5]
COHORTS = [[0, 2, 5], [1, 2, 3, 4], [0, 1, 5], [2, 4]]
SMALL = {"model": "mlp", "clients": 8, "participation": 0.4, "rounds": 5, "epochs": 1, "batch_size": 20}
"""A run of the embedded digits that takes no time, as keys of a configuration."""

TRAINING = Training(zeta=0.7, lr=0.3, lr_decay=0.9, weight_decay=0.01, clip=0.5, epochs=2, batch_size=6, seed=3)


def samples(sizes=SIZES, classes=4, features=5, seed=0) -> Samples:
    """Rows of random numbers with random labels, split in order."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    x = torch.tensor(rng.normal(size=(n, features)) * 2)
    y = torch.tensor(rng.integers(0, classes, n))
    parts = list(torch.arange(n).split(sizes))
    return Samples(x, y, x[:10], y[:10], parts, (0.0,), (1.0,), False)


def network(seed=0, hidden=(7,)) -> nn.Module:
    torch.manual_seed(seed)
    return MLP((5,), 4, hidden).double()


def engine(name="fedavg", hyper=None, *, training=TRAINING, chunk=None, model=None, data=None, **options) -> Engine:
    return Engine(
        Stacked(model or network(), **options),
        ALGORITHMS[name](**(hyper or {})),
        data or samples(),
        training,
        chunk=chunk,
        precision="fp64",
    )


def play(machine: Engine, cohorts=COHORTS):
    """All rounds; the final state and the outcomes."""
    state = machine.start()
    return state, [machine.round(state, cohort) for cohort in cohorts]


def batches(data: Samples, training: Training):
    """The batches the engine draws, one client at a time, as the reference wants them."""

    def of(t, k):
        n = len(data.parts[k])
        drawn = plan(training.seed, t, [k], [n], training.epochs, training.batch_size, torch.device("cpu"))
        x, y = data.x[data.parts[k]].numpy(), data.y[data.parts[k]].numpy()
        for j, count in enumerate(drawn.counts[0]):
            at = drawn.sample[0, j, :count].numpy()
            yield x[at], y[at]

    return of


class Loop:
    """In the place of captured graphs: takes the steps; notes how many clients they hold, and how often it lets go."""

    def __init__(self):
        self.sizes, self.cleared = [], 0

    def capture(self, task):
        if "w" in task.carry and len(task.carry["w"]) not in self.sizes:
            self.sizes.append(len(task.carry["w"]))

    def clear(self):
        self.cleared += 1

    def run(self, task):
        self.capture(task)
        carry = task.carry
        for j in range(task.steps):
            carry = task.step(task.inputs, j, carry)
        return carry
