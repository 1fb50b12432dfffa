"""What an algorithm is: a local step, an end of the local work, a step of the server. All on flat vectors.

A model is a vector of P numbers; a cohort of S clients is a matrix `[S, P]`; norms and products run over the
last axis. An algorithm therefore reads the same for one client, for a cohort, for a stack of runs and for a
client in a process of its own. It never sees batches, the MAN term, devices or random numbers: the engine hands
it a function `grad` that maps `[S, P]` weights to `[S, P]` gradients of the clients' objective
F = cross-entropy + ζ·MAN on the current batch.

This package uses methods of tensors only and so imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

State = Mapping[str, "Tensor"]
"""Named flat vectors: the server's `[P]`, a cohort's `[S, P]`."""

Grad = Callable[["Tensor"], "Tensor"]


class Fused(Protocol):
    """GPU kernels that do what `sgd` and `climb` say, in fewer passes over memory."""

    @property
    def clip_update(self) -> Callable[..., Tensor]: ...

    @property
    def climb(self) -> Callable[..., Tensor]: ...


@dataclass(frozen=True)
class Local:
    """What all local steps of a round share."""

    lr: Tensor  # η_t, the decayed learning rate; a tensor so that a captured graph can replay with another value
    lr0: float  # η_0, the learning rate of round 0
    decay: float  # λ, the L2 weight decay
    clip: float  # C, the bound on the norm of a client's whole gradient
    p: Tensor  # [S, 1], p_k = n_k·N / Σn, a client's size relative to the mean (1 when balanced)
    steps: Tensor  # [S, 1], K_k, the local steps a client takes in a round
    is_weight: Tensor  # [P], True for entries of tensors named "weight", False for biases
    fused: Fused | None = None


@dataclass(frozen=True)
class Algorithm:
    """Federated averaging, and the defaults of all others. A subclass is a frozen set of hyper-parameters."""

    title: ClassVar[str]
    server: ClassVar[tuple[str, ...]] = ("w",)  # vectors the server keeps; "w" is θ, the model sent to clients
    client: ClassVar[tuple[str, ...]] = ()  # vectors each client keeps between its rounds, zero at first
    weighted: ClassVar[bool] = False  # uploads are averaged by sample counts (True) or plainly (False)
    scratch: ClassVar[tuple[str, ...]] = ()  # vectors carried from one local step to the next, zero at first

    def begin(self, server: State, client: State, hp: Local) -> State:
        """What stays the same over the local steps, computed once; `step` finds it in `client`."""
        return {}

    def step(self, w: Tensor, grad: Grad, server: State, client: State, hp: Local) -> Tensor | Scratch:
        """One local step. Pure: no host sync, no branch on a value, no draw, no write to its inputs."""
        raise NotImplementedError

    def finish(self, w: Tensor, server: State, client: State, hp: Local) -> tuple[State, State]:
        """After the last step: the client's new memory, and what it uploads (always its model, "w")."""
        return {}, {"w": w}

    def update(self, server: State, mean: State, fraction: float) -> State:
        """The server's step, from the mean of the uploads; `fraction` = |S_t| / N turns it into Σ/N."""
        return {"w": mean["w"]}


Scratch = tuple["Tensor", State]
"""A step's result where something other than w is carried on: (w, the algorithm's `scratch` vectors)."""


def norm(g: Tensor) -> Tensor:
    """‖g‖₂ of every row, `[S, 1]`."""
    return g.norm(dim=-1, keepdim=True)


def clip_factor(g: Tensor, bound: float) -> Tensor:
    """min(1, C / (‖g‖₂ + 1e-6)) of every row, `[S, 1]`: clip(g) = g · clip_factor(g)."""
    return (bound / (norm(g) + 1e-6)).clamp(max=1)


def sgd(w: Tensor, g: Tensor, hp: Local, extra_decay: Tensor | float = 0.0) -> Tensor:
    """w − η(clip(g) + (λ + extra)·w): `g` is inside the clip, weight decay outside it."""
    if hp.fused is not None:
        return hp.fused.clip_update(w, g, hp.lr, hp.clip, hp.decay, extra_decay)
    shrunk = w * (1 - hp.lr * (hp.decay + extra_decay))
    return shrunk.addcmul_(g, -hp.lr * clip_factor(g, hp.clip))  # two passes over [S, P] instead of five


def climb(w: Tensor, s: Tensor, rho: float, hp: Local, eps: float = 1e-16, eta: float | None = None) -> Tensor:
    """w + e with e = ρ·T²s / (‖T s‖₂ + ε): the point uphill from which SAM-type methods look back.

    T = 1; with η_a (`eta`): T = |w| + η_a for weights and 1 for biases, a scale of its own for every weight.
    """
    if hp.fused is not None:
        return hp.fused.climb(w, s, rho, eps, eta, hp.is_weight)
    if eta is None:
        return w + s * (rho / (norm(s) + eps))
    T = (w.abs() + eta).where(hp.is_weight, 1)
    Ts = T * s
    return w + T * Ts * (rho / (norm(Ts) + eps))
