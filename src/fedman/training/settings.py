"""How clients train, whatever the algorithm; the one place of these defaults. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """The settings of local training. The defaults are the paper's, without its penalty."""

    zeta: float = 0.0  # ζ, weight of the penalty
    lr: float = 0.1  # η_0, learning rate of round 0
    lr_decay: float = 0.998
    weight_decay: float = 1e-3  # λ
    clip: float = 10.0  # C, bound on the norm of a client's gradient
    epochs: int = 5
    batch_size: int = 50
    seed: int = 0

    def rate(self, t: int) -> float:
        """η_t, the learning rate of round t (counted from 0)."""
        return self.lr * self.lr_decay**t
