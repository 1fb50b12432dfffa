"""Adam and AdamW. Kingma and Ba, 'Adam: A Method for Stochastic Optimization', 2015; Loshchilov and Hutter, 'Decoupled
Weight Decay Regularization', 2019."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedman.optimizers.base import LocalOptimizer, Rates, State, clip_factor
from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Adam(LocalOptimizer):
    """d = clip(g) + λw; m ← β₁m + (1−β₁)d; v ← β₂v + (1−β₂)d²; w ← w − η·m̂/(√v̂ + ε), with m̂ = m/(1−β₁^t) and
    v̂ = v/(1−β₂^t) after the client's t-th step."""

    title = "Adam"
    decoupled: ClassVar[bool] = False  # weight decay beside the step, not in d

    adam_beta1: float = hyperparameter(0.9, "β₁, memory of the gradient", maximum=0.9999)
    adam_beta2: float = hyperparameter(0.999, "β₂, memory of its square", maximum=0.999999)
    adam_eps: float = hyperparameter(1e-8, "ε, added to the root", minimum=1e-16)

    def init(self, w: Tensor) -> State:
        return {"m": w.new_zeros(w.shape), "v": w.new_zeros(w.shape), "t": w.new_zeros((len(w), 1))}

    def update(
        self, w: Tensor, g: Tensor, state: State, hp: Rates, extra_decay: Tensor | float = 0.0
    ) -> tuple[Tensor, State]:
        decay = hp.decay + extra_decay
        d = g * clip_factor(g, hp.clip)
        if not self.decoupled:
            d = d + decay * w
        t = state["t"] + 1
        m = self.adam_beta1 * state["m"] + (1 - self.adam_beta1) * d
        v = self.adam_beta2 * state["v"] + (1 - self.adam_beta2) * d * d
        step = m / (1 - self.adam_beta1**t) / ((v / (1 - self.adam_beta2**t)).sqrt() + self.adam_eps)
        shrunk = w * (1 - hp.lr * decay) if self.decoupled else w
        return shrunk - hp.lr * step, {"m": m, "v": v, "t": t}

    def reach(self, norm: float, steps: int, size: int, lr: float, clip: float, decay: float) -> float:
        """An entry of m̂/√v̂ is at most b_t by Cauchy's inequality, so that a step's norm is at most η·b_t·√P.

        With weights a_i of m̂ and b_i of v̂ over the t gradients, b_t² = Σ a_i²/b_i; it grows with t to
        (1−β₁)²/((1−β₂)(1−β₁²/β₂)), which bounds a state kept from earlier rounds too.
        """
        b1, b2 = self.adam_beta1, self.adam_beta2
        if b1 * b1 >= b2:
            return math.inf
        most = max(1.0, math.sqrt((1 - b1) ** 2 / ((1 - b2) * (1 - b1 * b1 / b2)))) * math.sqrt(size)
        r = 0.0
        for _ in range(steps):
            r += lr * (most + (decay * (norm + r) if self.decoupled else 0.0))
        return r


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay beside the step: w ← (1 − ηλ)w − η·m̂/(√v̂ + ε), d = clip(g)."""

    title = "AdamW"
    decoupled = True
