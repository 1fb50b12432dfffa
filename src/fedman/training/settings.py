"""How clients train, whatever the algorithm. Imports without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

BUFFERS = "model.buffers"
"""The name of the models' buffers `[Q]`, such as running statistics, among the server's vectors, those carried on and
uploads. Algorithms do not see them."""

BatchNorm = Literal["average", "local"]
LrSchedule = Literal["decay", "constant", "cosine"]


@dataclass(frozen=True)
class Training:
    """The settings that all local steps of a run share; the defaults are the paper's."""

    zeta: float = 0.0  # ζ, weight of the penalty
    lr: float = 0.1  # η_0
    lr_schedule: LrSchedule = "decay"
    lr_decay: float = 0.998  # of the schedule `decay`
    warmup: int = 0  # rounds in which the rate rises to the schedule's
    rounds: int = 500  # T, at whose end the cosine is zero
    weight_decay: float = 1e-3  # λ
    clip: float = 10.0  # C
    keep_optimizer: bool = False  # whether the optimiser's state is a client's memory, or new in every round
    batch_norm: BatchNorm = "average"  # whether batch-norm layers are averaged, or a client keeps its own (FedBN)
    epochs: int = 5  # E
    batch_size: int = 50  # B
    seed: int = 0

    def rate(self, t: int) -> float:
        """η_t, the learning rate of round t (counted from 0).

        decay: η_0·d^t; constant: η_0; cosine: η_0·(1 + cos(πt/T))/2. In the first `warmup` rounds times (t + 1)/warmup.
        """
        factor = {
            "decay": lambda: self.lr_decay**t,
            "constant": lambda: 1.0,
            "cosine": lambda: (1 + math.cos(math.pi * t / self.rounds)) / 2,
        }[self.lr_schedule]()
        return self.lr * factor * (min(1.0, (t + 1) / self.warmup) if self.warmup else 1.0)
