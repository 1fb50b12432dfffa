"""What released code and fedman both play: the same start, clients, cohorts, batches and rates.

Six clients with random samples, a network with one hidden layer, six rounds of four steps each. The clip is 10, which
most of the released code has written in it; the inputs are so large that it acts in about half of FedAvg's steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedman.algorithms import Algorithm
from fedman.models.parameters import flatten
from fedman.penalties import HiddenMAN
from fedman.training.settings import Training

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests import federations

network = federations.network

SEED = 12
COHORTS = [[0, 2, 4], [1, 5], [3, 4], [1, 2, 3, 4], [0, 3, 4, 5], [0, 2, 3]]
"""What FedDyn's code, and all that was made from it, draws with this seed, where every second client takes part."""

TRAINING = Training(zeta=0.0, lr=0.02, lr_decay=0.9, weight_decay=0.01, clip=10.0, epochs=1, batch_size=10, seed=3)
EQUAL_SIZES, UNEQUAL_SIZES = [40] * 6, [40, 31, 36, 33, 40, 38]
CLIENTS, STEPS = len(EQUAL_SIZES), 4
SCALE = 20.0


class Setting:
    """Clients of these sizes, trained in this way; `zeta` is the weight of MAN without the logits."""

    def __init__(self, sizes: Sequence[int] = EQUAL_SIZES, **training: float) -> None:
        data = federations.samples(sizes)
        self.samples = replace(data, x=data.x * SCALE)
        self.training = replace(TRAINING, **training)
        self.x = [self.samples.x[part].numpy() for part in self.samples.parts]
        self.y = [self.samples.y[part].numpy() for part in self.samples.parts]
        self._batches = federations.batches(self.samples, self.training)

    def batches(self, t: int, k: int) -> list[tuple[Tensor, Tensor]]:
        """Those of client k in round t."""
        return [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in self._batches(t, k)]

    def data_loader(self) -> Callable[..., list[tuple[Tensor, Tensor]]]:
        """In the place of torch's DataLoader: from a client's inputs to the batches of the next round that it plays."""
        rounds = [iter([t for t, cohort in enumerate(COHORTS) if k in cohort]) for k in range(CLIENTS)]

        def loader(x: np.ndarray, *_: object, **__: object) -> list[tuple[Tensor, Tensor]]:
            k = next(k for k, held in enumerate(self.x) if held is x)
            return self.batches(next(rounds[k]), k)

        return loader

    def fedman(self, algorithm: Algorithm) -> list[Tensor]:
        """The server's model after every round."""
        played = federations.simulation(algorithm, data=self.samples, training=self.training, penalty=HiddenMAN())
        state, models = played.start(), []
        for cohort in COHORTS:
            played.round(state, cohort)
            models.append(played.federation.models(state)["cloud"].clone())
        return models


def vector(state: dict[str, Tensor]) -> Tensor:
    """A model's tensors by name as one vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in state.values()]).clone()


def start() -> Tensor:
    """The initial model as a vector."""
    return flatten(network()).clone()


class Wrapped(nn.Module):
    """The network, for code whose models return more than logits."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
