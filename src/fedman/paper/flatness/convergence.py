"""Convergence of FedAvg on F = f + ζR, the inequality beside what happens, in float64.

The paper's Proposition 1, paraphrased from notes, asks for smooth clients (A1), a bounded variance of their gradients
(A2) and bounded differences between clients (A3), and concludes that gradients of the objective become small. With all
clients and all samples in every step, which makes the variance 0, its constants are easily proved: each client takes
K steps of size η, and if ηKL ≤ 1/3,

    (1/T) Σ_t ‖∇F(θ_t)‖² ≤ 4 (F(θ_0) − F*) / (ηKT) + 9 (ηKL)² σ²

where every F_k is L-smooth and (1/N) Σ_k ‖∇F_k − ∇F‖² ≤ σ². Proof: with g the mean of all gradients of a round,
F(θ⁺) ≤ F − ηK/2 ‖∇F‖² + ηK/2 ‖∇F − g‖² since ηKL ≤ 1; ‖∇F − g‖² ≤ L² times the mean squared distance of the clients'
iterates from θ, which is at most 4.5 (ηK)² (‖∇F‖² + σ²) since ηKL ≤ 1/2; and 4.5 (ηKL)² ≤ 1/2. The proposition says
nothing where ηKL is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, hessian, vmap
from torch.nn.functional import cross_entropy

CLIENTS, STEPS, ROUNDS = 5, 5, 60
CLASSES, FEATURES, SAMPLES, HIDDEN = 3, 4, 12, 3
LIMIT = 1 / 3  # of ηKL

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
Slopes = Callable[[Tensor, Tensor, Tensor], Tensor]  # of all clients at once


@dataclass(frozen=True)
class Convergence:
    """Both sides of the inequality on one problem."""

    problem: str
    left: float  # the mean of ‖∇F(θ_t)‖²
    right: float
    reach: float  # ηKL
    smoothness: float  # L
    difference: float  # σ²

    @property
    def holds(self) -> bool:
        """Whether left ≤ right."""
        return self.left <= self.right


def convex(w: Tensor, x: Tensor, y: Tensor, zeta: float = 0.15, decay: float = 0.1) -> Tensor:
    """Logistic regression with ζ times the mean square of its logits and weight decay: strongly convex."""
    logits = x @ w.view(FEATURES, CLASSES)
    return cross_entropy(logits, y) + zeta * logits.square().mean() + decay / 2 * w.square().sum()


def non_convex(w: Tensor, x: Tensor, y: Tensor, zeta: float = 0.15) -> Tensor:
    """A network with a hidden layer of tanh, and ζ times MAN of both layers."""
    first, second = w.split([FEATURES * HIDDEN, HIDDEN * CLASSES])
    a = torch.tanh(x @ first.view(FEATURES, HIDDEN))
    logits = a @ second.view(HIDDEN, CLASSES)
    return cross_entropy(logits, y) + zeta * (a.square().mean() + logits.square().mean())


PROBLEMS: dict[str, tuple[Objective, int]] = {
    "strongly convex": (convex, FEATURES * CLASSES),
    "non-convex": (non_convex, (FEATURES + CLASSES) * HIDDEN),
}


def check(problem: str, reach: float = LIMIT, seed: int = 0, rounds: int | None = None) -> Convergence:
    """FedAvg with ηKL = `reach` on one of the problems, and both sides of the inequality.

    L and σ² are the largest that are met on the way. F* is the value after many more steps: not below the true one, so
    that the right side is not too large.
    """
    objective, size = PROBLEMS[problem]
    rounds = rounds or ROUNDS
    generator = torch.Generator().manual_seed(seed)
    x, y = _clients(generator)
    values = vmap(objective, in_dims=(0, 0, 0))
    slopes = vmap(grad(objective), in_dims=(0, 0, 0))
    curvatures = vmap(hessian(objective), in_dims=(0, 0, 0))
    start = torch.randn(size, generator=generator, dtype=torch.float64)
    smoothness, met = 0.0, _largest(curvatures, [start], x, y)
    while met > smoothness:  # the steps depend on L, and L on where the steps lead
        smoothness = 1.05 * met
        rate = reach / (STEPS * smoothness)
        path, iterates = _federate(slopes, x, y, start, rate, rounds)
        met = _largest(curvatures, iterates, x, y)
    gradients = torch.stack([slopes(w.expand(CLIENTS, -1), x, y) for w in path])
    means = gradients.mean(1)
    difference = float((gradients - means[:, None]).square().sum(-1).mean(1).max())
    low = path[-1]
    for _ in range(rounds):
        low = low - slopes(low.expand(CLIENTS, -1), x, y).mean(0) / smoothness
    first, last = (float(values(w.expand(CLIENTS, -1), x, y).mean()) for w in (start, low))
    right = 4 * (first - last) / (rate * STEPS * rounds) + 9 * reach**2 * difference
    return Convergence(problem, float(means.square().sum(-1).mean()), right, reach, smoothness, difference)


def _clients(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Samples `[N, n, features]` around points of each client's own, with random labels."""
    centres = torch.randn(CLIENTS, 1, FEATURES, generator=generator, dtype=torch.float64)
    x = centres + torch.randn(CLIENTS, SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (CLIENTS, SAMPLES), generator=generator)


def _federate(
    slopes: Slopes, x: Tensor, y: Tensor, w: Tensor, rate: float, rounds: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The server's models before every round, and the clients' models after every step of every tenth round."""
    path, iterates = [], []
    for t in range(rounds):
        path.append(w)
        clients = w.expand(CLIENTS, -1)
        for _ in range(STEPS):
            clients = clients - rate * slopes(clients, x, y)
            if t % 10 == 0:
                iterates.append(clients)
        w = clients.mean(0)
    return path, iterates


def _largest(curvatures: Slopes, points: Sequence[Tensor], x: Tensor, y: Tensor) -> float:
    """The largest absolute eigenvalue of a client's Hessian at its own point."""
    found = [torch.linalg.eigvalsh(curvatures(w.expand(CLIENTS, -1), x, y)) for w in points]
    return float(torch.stack(found).abs().max())
