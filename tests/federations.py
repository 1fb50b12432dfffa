"""A small federation for the tests: ragged clients, ragged cohorts, a clip that acts, in float64."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedman.algorithms import ALGORITHMS, Algorithm
from fedman.backends.in_process import InProcess, default_chunk
from fedman.errors import Diverged
from fedman.execution.choice import choose
from fedman.execution.executor import Executor
from fedman.models.mlp import MLP
from fedman.models.parameters import flatten, flatten_buffers
from fedman.optimizers import SGD
from fedman.penalties import MAN
from fedman.runs.build import build, relative_sizes
from fedman.tasks import Classification
from fedman.training.aggregate import Outcome, collect
from fedman.training.batches import Samples
from fedman.training.evaluate import Evaluator
from fedman.training.federation import Assignment, Federation
from fedman.training.randomness import plan
from fedman.training.round import Round
from fedman.training.settings import Training
from fedman.training.state import RunState

SIZES = [13, 7, 20, 9, 16, 5]
COHORTS = [[0, 2, 5], [1, 2, 3, 4], [0, 1, 5], [2, 4]]
SMALL = {"model": "mlp", "clients": 8, "participation": 0.4, "rounds": 5, "epochs": 1, "batch_size": 20}
"""A run of the embedded digits that takes no time, as keys of a configuration."""

TASK, PENALTY, OPTIMIZER = Classification(), MAN(), SGD()
TRAINING = Training(zeta=0.7, lr=0.3, lr_decay=0.9, weight_decay=0.01, clip=0.5, epochs=2, batch_size=10, seed=3)


def samples(sizes=SIZES, classes=4, features=5, seed=0) -> Samples:
    """Rows of random numbers with random labels, split in order."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    x = torch.tensor(rng.normal(size=(n, features)) * 2)
    y = torch.tensor(rng.integers(0, classes, n))
    parts = np.split(np.arange(n), np.cumsum(sizes)[:-1])
    return Samples(x, y, x[:10], y[:10], parts, (0.0,), (1.0,), False)


def network(seed=0, hidden=(7,)) -> nn.Module:
    torch.manual_seed(seed)
    return MLP((5,), 4, hidden).double()


@dataclass(frozen=True)
class Simulation:
    """A federation and what plays its rounds in this process."""

    federation: Federation
    backend: InProcess

    def start(self) -> RunState:
        return self.federation.start()

    def round(self, state: RunState, cohort: list[int]) -> Outcome:
        (outcome,) = together([self], [state], [cohort])
        if isinstance(outcome, Diverged):
            raise outcome
        return outcome

    def evaluate(self, w, batch=None) -> tuple[float, float]:
        """The headline and the mean loss of a model on the test set."""
        evaluator = Evaluator(self.backend.executor, self.federation.samples, self.federation.dtype, batch)
        figures, loss = evaluator.grade(evaluator.scores(w).tolist())
        return figures[evaluator.task.headline], loss


def simulation(
    name="fedavg", hyper=None, *, training=TRAINING, chunk=None, model=None, data=None, execution=None, longest=None,
    graphs=None, precision="fp64", device="cpu", task=TASK, penalty=PENALTY, optimizer=OPTIMIZER,
) -> Simulation:  # fmt: skip
    model, data, device = model or network(), data or samples(), torch.device(device)
    size = len(flatten(model))
    chunk = chunk or default_chunk(size, device)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    shape, example = data.shape if data.images else (), (data.inputs(data.x[:2], dtype), data.y[:2])
    parts = model, task, penalty, precision
    made = execution(*parts) if execution else choose(*parts, device, chunk, example, shape)
    federation = Federation(
        algorithm=name if isinstance(name, Algorithm) else ALGORITHMS[name](**(hyper or {})),
        optimizer=optimizer,
        samples=data,
        training=training,
        initial=flatten(model).to(device, dtype),
        initial_buffers=flatten_buffers(model).to(device, dtype) if made.buffers.names else None,
        is_weight=made.parameters.is_weight().to(device),
        relative_size=relative_sizes(data.sizes(range(len(data.parts)))),
        ids=range(len(data.parts)),
        longest=longest,
        image_layout=made.image_layout,
        fused=made.fused,
    )
    return Simulation(federation, InProcess(Executor(made, device, threading.Event(), graphs), chunk))


def simulator(config, data, parts=None) -> Simulation:
    """The run of a configuration, in this process."""
    built = build([config], data, "cpu", parts=parts)
    return Simulation(built.federations[0], built.in_process)


def together(simulations, states, cohorts) -> list:
    """One round of several simulations, stacked by the first one's backend: their outcomes."""
    now = [
        Assignment(s.federation, state, Round(state.round, cohort, s.federation.training.rate(state.round)))
        for s, state, cohort in zip(simulations, states, cohorts, strict=True)
    ]
    return list(collect(now, simulations[0].backend.train(now, [])))


def play(machine: Simulation, cohorts=COHORTS):
    """All rounds; the final state and the outcomes."""
    state = machine.start()
    return state, [machine.round(state, cohort) for cohort in cohorts]


def forget(state: RunState, clients, *names):
    """Set these clients' memories of these names to zero, by default all of them."""
    memory = {k: v.zero_() if k in names or not names else v for k, v in state.clients.memories(clients).items()}
    state.clients.save(state.round, clients, torch.stack(state.clients.uploads(clients)), memory)


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

    def capture(self, steps):
        if "w" in steps.carry and len(steps.carry["w"]) not in self.sizes:
            self.sizes.append(len(steps.carry["w"]))

    def clear(self):
        self.cleared += 1

    def run(self, steps):
        self.capture(steps)
        carry = steps.carry
        for j in range(steps.count):
            carry = steps.step(steps.inputs, j, carry)
        return dict(carry), steps.figures(steps.inputs, 0, carry)
