"""A run whose rounds a benchmark plays one by one."""

import numpy as np
from torch import Tensor

from fedman.config import resolve
from fedman.data import Dataset
from fedman.runs.build import build
from fedman.training.aggregate import Outcome, collect
from fedman.training.federation import Assignment
from fedman.training.round import Round
from fedman.training.state import joined


class Rounds:
    """The paper's CIFAR CNN on random images, 500 for each of `clients` clients, from a pool of at most 50,000."""

    def __init__(self, clients: int, algorithm: str, device: str, precision: str, zeta: float = 0.15) -> None:
        rng, n = np.random.default_rng(0), min(500 * clients, 50_000)
        self.x = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        self.y = rng.integers(0, 100, n)
        data = Dataset("cifar100", self.x, self.y, self.x[:1000], self.y[:1000], 100, (0.5,) * 3, (0.25,) * 3, True)
        config = resolve({
            "dataset": "cifar100", "clients": clients, "algorithm": algorithm, "zeta": zeta, "precision": precision,
        })  # fmt: skip
        parts = [(np.arange(500) + 500 * k) % n for k in range(clients)]
        self.built = build([config], data, device, parts=parts)
        (self.federation,), self.backend = self.built.federations, self.built.in_process
        self.state = self.federation.start()

    def plan(self, cohort: list[int]) -> Assignment:
        t = self.state.round
        return Assignment(self.federation, self.state, Round(t, cohort, self.federation.training.rate(t)))

    def play(self, cohort: list[int]) -> Outcome:
        now = [self.plan(cohort)]
        (outcome,) = collect(now, self.backend.train(now, []))
        assert isinstance(outcome, Outcome)
        return outcome

    def evaluate(self) -> Tensor:
        return self.built.evaluator.scores(joined(self.state.sel))
