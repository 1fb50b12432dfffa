"""How clients train, whatever the algorithm. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """The settings that all local steps of a run share; the defaults are the paper's."""

    zeta: float = 0.0  # ζ, weight of the MAN term
    lr: float = 0.1  # η_0
    lr_decay: float = 0.998
    weight_decay: float = 1e-3  # λ
    clip: float = 10.0  # C
    epochs: int = 5  # E
    batch_size: int = 50  # B
    seed: int = 0

    def rate(self, t: int) -> float:
        """η_t, the learning rate of round t (counted from 0)."""
        return self.lr * self.lr_decay**t
