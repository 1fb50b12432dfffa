"""Stochastic gradient descent, with momentum where it is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.optimizers.base import LocalOptimizer, Rates, State, clip_factor
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SGD(LocalOptimizer):
    """d = clip(g) + λw (`decay_inside`: clip(g + λw)); v ← μv + d; w ← w − ηv (`nesterov`: w − η(d + μv)).

    The defaults are the paper's: w ← w − η(clip(g) + λw), without a state.
    """

    title = "SGD"

    momentum: float = hyperparameter(0.0, "μ, momentum of SGD", maximum=0.9999)
    nesterov: bool = hyperparameter(False, "Nesterov's form of momentum")
    decay_inside: bool = hyperparameter(False, "weight decay inside the clip")

    @property
    def is_plain_sgd(self) -> bool:
        return not self.momentum and not self.decay_inside

    def init(self, w: Tensor) -> State:
        return {"v": w.new_zeros(w.shape)} if self.momentum else {}

    def update(
        self, w: Tensor, g: Tensor, state: State, hp: Rates, extra_decay: Tensor | float = 0.0
    ) -> tuple[Tensor, State]:
        if self.is_plain_sgd:
            return _plain(w, g, hp, extra_decay), state
        decay = (hp.decay + extra_decay) * w
        if self.decay_inside:
            d = g + decay
            d = d * clip_factor(d, hp.clip)
        else:
            d = g * clip_factor(g, hp.clip) + decay
        if not self.momentum:
            return w - hp.lr * d, state
        v = self.momentum * state["v"] + d
        return w - hp.lr * (d + self.momentum * v if self.nesterov else v), {"v": v}

    def reach(self, norm: float, steps: int, size: int, lr: float, clip: float, decay: float) -> float:
        """r ← r + η(C + λ(‖θ‖ + r))/(1 − μ): a velocity is at most that of endless steps, also one that was kept from
        earlier rounds, and so is d + μv of Nesterov's form."""
        if math.isinf(clip):
            return math.inf
        r = 0.0
        for _ in range(steps):
            d = clip if self.decay_inside else clip + decay * (norm + r)
            r += lr * d / (1 - self.momentum)
        return r


def _plain(w: Tensor, g: Tensor, hp: Rates, extra_decay: Tensor | float) -> Tensor:
    """w − η(clip(g) + (λ + extra)·w): `g` is inside the clip, weight decay outside it."""
    if hp.fused is not None:
        return hp.fused.clip_update(w, g, hp.lr, hp.clip, hp.decay, extra_decay)
    shrunk = w * (1 - hp.lr * (hp.decay + extra_decay))
    return shrunk.addcmul_(g, -hp.lr * clip_factor(g, hp.clip))  # two passes over [S, P] instead of five
