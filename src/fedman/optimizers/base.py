"""What a local optimiser is: how a client descends along the direction that its algorithm gives.

All on flat vectors `[S, P]`, row by row, with methods of tensors only: this package imports without torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

State = Mapping[str, "Tensor"]
"""Named flat vectors: the server's `[P]`, a cohort's `[S, P]`."""


class Fused(Protocol):
    """GPU kernels that do what `SGD` and `climb` say, in fewer passes over memory."""

    @property
    def clip_update(self) -> Callable[..., Tensor]: ...

    @property
    def climb(self) -> Callable[..., Tensor]: ...


class Rates(Protocol):
    """What an optimiser reads of a round: see `fedman.algorithms.Local`."""

    @property
    def lr(self) -> Tensor: ...

    @property
    def decay(self) -> float: ...

    @property
    def clip(self) -> float: ...

    @property
    def fused(self) -> Fused | None: ...


@dataclass(frozen=True)
class LocalOptimizer(ABC):
    """How a client takes a step. A subclass is a frozen set of hyper-parameters."""

    title: ClassVar[str]

    def init(self, w: Tensor) -> State:
        """The state before a client's first step, from its model `[S, P]`: a row for every client."""
        return {}

    @abstractmethod
    def update(
        self, w: Tensor, g: Tensor, state: State, hp: Rates, extra_decay: Tensor | float = 0.0
    ) -> tuple[Tensor, State]:
        """The model and the state after a step along −g. Pure, as an algorithm's step is.

        Weight decay is λ = `hp.decay`, and `extra_decay` where an algorithm adds to it.
        """

    def reach(self, norm: float, steps: int, size: int, lr: float, clip: float, decay: float) -> float:
        """How far an honest client can get in `steps` steps from a model of `size` parameters with ‖θ‖ = `norm`.

        A server refuses what lies further out; by default nothing does.
        """
        return math.inf

    @property
    def is_plain_sgd(self) -> bool:
        """Whether a step is w − η(clip(g) + λw), as the formulas of some algorithms presume."""
        return False


class Descent:
    """An optimiser with its present state: what an algorithm's step calls by `descend`."""

    def __init__(self, optimizer: LocalOptimizer, state: State) -> None:
        self.optimizer, self.state = optimizer, state

    def __call__(self, w: Tensor, g: Tensor, hp: Rates, extra_decay: Tensor | float) -> Tensor:
        w, self.state = self.optimizer.update(w, g, self.state, hp, extra_decay)
        return w


def norm(g: Tensor) -> Tensor:
    """‖g‖₂ of every row, `[S, 1]`."""
    return g.norm(dim=-1, keepdim=True)


def clip_factor(g: Tensor, bound: float) -> Tensor:
    """min(1, C / (‖g‖₂ + 1e-6)) of every row, `[S, 1]`: clip(g) = g · clip_factor(g)."""
    return (bound / (norm(g) + 1e-6)).clamp(max=1)
