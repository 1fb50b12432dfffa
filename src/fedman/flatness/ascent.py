"""The largest loss in a ball around a model's weights, by projected gradient ascent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.flatness.loss_at import LossAt
from fedman.flatness.weight_scale import weight_scale


@dataclass(frozen=True)
class Ascent:
    """max L(w + δ) over ‖δ/c‖_p ≤ ρ with c = |w| if adaptive, else 1: normalised gradient ascent in ε = δ/c.

    A step goes in the norm's steepest direction, g/‖g‖₂ or sign g for g = c⊙∇L(w + c⊙ε), by η = 2ρ at first, and back
    onto the ball; one that does not raise the loss is undone and η halved. The first start is ε = 0, `restarts` others
    are random points of the surface, the same for every device; the best of all counts. What is found is attained, so
    it is a lower bound of the maximum; for a loss that is monotone in a linear function of w the first step finds it.

    >>> data = torch.tensor([[3.0, 4.0]]), torch.ones(1)
    >>> loss_at = LossAt(nn.Linear(2, 1, bias=False), lambda output, target: output.mean(), data)
    >>> rise, delta = Ascent(rho=0.1, adaptive=False)(loss_at)
    >>> round(rise, 6), delta
    (0.5, tensor([0.0600, 0.0800]))
    """

    rho: float
    p: float = 2  # or math.inf
    adaptive: bool = True
    steps: int = 20
    restarts: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.p not in (2, math.inf):
            raise UserError(f"p: {self.p}; 2 and inf are allowed")
        for name, value, least in (("steps", self.steps, 1), ("restarts", self.restarts, 0)):
            if value < least:
                raise UserError(f"{name}: {value}, at least {least} is needed")

    def __call__(self, loss_at: LossAt) -> tuple[float, Tensor]:
        """The largest rise L(w + δ) − L(w) found, and δ `[P]`."""
        w = loss_at.centre
        scale = weight_scale(w, self.rho, self.adaptive)
        generator = torch.Generator().manual_seed(self.seed)
        random = (torch.randn(len(w), generator=generator).to(w) for _ in range(self.restarts))
        starts = [torch.zeros_like(w), *(self.rho * self._steepest(direction) for direction in random)]
        centre = loss_at.at_centre()
        value, epsilon = max((self._climb(loss_at, scale, start) for start in starts), key=lambda found: found[0])
        return max(0.0, value - centre), scale * epsilon

    def _climb(self, loss_at: LossAt, scale: Tensor, epsilon: Tensor) -> tuple[float, Tensor]:
        """The largest loss on the way from a start, and where it is."""

        def at(place: Tensor) -> tuple[float, Tensor]:
            value, gradient = loss_at.with_gradient(loss_at.centre + scale * place)
            if not (math.isfinite(value) and gradient.isfinite().all()):
                raise UserError(f"rho: {self.rho}; loss or gradient is not finite at a moved model: take a smaller rho")
            return value, scale * gradient

        value, gradient = at(epsilon)
        rate = 2 * self.rho
        for _ in range(self.steps):
            if not gradient.any():
                break
            candidate = self._onto_ball(epsilon + rate * self._steepest(gradient))
            higher, slope = at(candidate)
            if higher > value:
                value, gradient, epsilon = higher, slope, candidate
            else:
                rate /= 2
        return value, epsilon

    def _steepest(self, gradient: Tensor) -> Tensor:
        if self.p == 2:
            return nn.functional.normalize(gradient, dim=0, eps=torch.finfo(gradient.dtype).tiny)
        return gradient.sign()

    def _onto_ball(self, epsilon: Tensor) -> Tensor:
        if self.p == 2:
            return epsilon * (self.rho / epsilon.norm()).clamp(max=1)
        return epsilon.clamp(-self.rho, self.rho)
