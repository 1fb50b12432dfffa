"""What an algorithm is: a local step, an end of the local work, a step of the server. All on flat vectors.

A model is a vector of P numbers; a cohort of S clients is a matrix `[S, P]`; norms and products run over the
last axis. An algorithm therefore reads the same for one client, for a cohort, for a stack of runs and for a
client in a process of its own. It never sees batches, tasks, penalties, devices or random numbers: it is given
a function `grad` that maps `[S, P]` weights to `[S, P]` gradients of the clients' objective
F = loss + ζ·penalty on the current batch.

This package uses methods of tensors only and so imports without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedman.optimizers import SGD, Descent, Fused, State

if TYPE_CHECKING:
    from torch import Tensor

Grad = Callable[["Tensor"], "Tensor"]
PLAIN = Descent(SGD(), {})


@dataclass(frozen=True)
class Local:
    """What all local steps of a round share."""

    lr: Tensor  # η_t, the decayed learning rate; a tensor so that a captured graph can replay with another value
    lr0: float  # η_0, the learning rate before decay and warm-up
    decay: float  # λ, the L2 weight decay
    clip: float  # C, the bound on the norm of a client's whole gradient
    p: Tensor  # [S, 1], p_k = n_k·N / Σn, a client's size relative to the mean (1 when balanced)
    steps: Tensor  # [S, 1], K_k, the local steps a client takes in a round
    is_weight: Tensor  # [P], True for entries of tensors named "weight", False for biases
    fused: Fused | None = None
    descent: Callable[[Tensor, Tensor, Local, Tensor | float], Tensor] = PLAIN  # what `descend` calls


@dataclass(frozen=True)
class Algorithm(ABC):
    """Federated averaging, and the defaults of all others. A subclass is a frozen set of hyper-parameters."""

    title: ClassVar[str]
    server: ClassVar[tuple[str, ...]] = ("w",)  # vectors the server keeps; "w" is θ, the model sent
    client: ClassVar[tuple[str, ...]] = ()  # vectors each client keeps between its rounds, zero at first
    weighted: ClassVar[bool] = False  # uploads are averaged by sample counts (True) or plainly (False)
    gradients_per_step: ClassVar[int] = 1  # calls of `grad` in a step: what it costs
    cloud: ClassVar[str] = "w"  # the server's vector that is its model, where that is not the one sent
    presumes_sgd: ClassVar[bool] = False  # whether a formula holds for plain SGD alone, as (θ − w)/(Kη) does

    @property
    def scratch(self) -> tuple[str, ...]:
        """Vectors carried from one local step to the next, zero at first.

        One that is among `client` too is a memory that changes in every step: it starts as the client remembers it, and
        `finish` finds its last value.
        """
        return ()

    def begin(self, server: State, client: State, hp: Local) -> State:
        """What stays the same over the local steps, computed once; `step` finds it in `client`."""
        return {}

    @abstractmethod
    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor | Scratch:
        """One local step. Pure: no host sync, no branch on a value, no draw, no write to its inputs."""

    def finish(self, w: Tensor, server: State, client: State, hp: Local) -> tuple[State, State]:
        """After the last step: the client's new memory, and what it uploads (always its model, "w")."""
        return {}, {"w": w}

    def update(self, server: State, mean: State, fraction: float) -> State:
        """The server's step, from the mean of the uploads; `fraction` = |S_t| / N turns it into Σ/N."""
        return {"w": mean["w"]}

    def extra_decay(self, p: float) -> float:
        """What `step` adds to the weight decay, outside the clip, for a client of relative size p.

        With it the optimiser says how far an honest client can get, so that a server can refuse what lies further out.
        """
        return 0.0

    def upload_norm(self, reach: float, steps: int) -> float:
        """The largest norm of what an honest client uploads beside its model, after `steps` local steps in all rounds.

        `reach` is how far its model can get in a round.
        """
        return reach


Scratch = tuple["Tensor", State]
"""A step's result where something other than w is carried on: (w, the algorithm's `scratch` vectors)."""
