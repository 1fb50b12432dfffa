"""The density of a symmetric operator's eigenvalues by stochastic Lanczos quadrature.

For a random start v of P signs, m Lanczos steps give T with eigenpairs (θ_i, s_i). The measure Σ_i s_{i,1}² δ(θ_i) has
the first 2m−1 moments of v's spectral measure, so Σ_i s_{i,1}² f(θ_i) ≈ vᵀf(H)v / P, whose mean over starts is
tr f(H) / P. With f a Gaussian of width σ around t this is the smoothed density at t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedman.errors import UserError
from fedman.flatness.lanczos import Lanczos
from fedman.flatness.operator import Operator, Progress, random_signs


@dataclass(frozen=True)
class Curve:
    """The smoothed density on a grid, with its standard error over the starts."""

    grid: Tensor
    mean: Tensor
    error: Tensor
    sigma: float


@dataclass(frozen=True)
class Density:
    """Nodes and weights of each start; the weights of a start sum to 1."""

    nodes: list[Tensor]
    weights: list[Tensor]
    products: int

    @property
    def span(self) -> tuple[float, float]:
        """The smallest and the largest node."""
        return min(float(t.min()) for t in self.nodes), max(float(t.max()) for t in self.nodes)

    def curve(self, sigma: float | None = None, points: int = 2000, grid: Tensor | None = None) -> Curve:
        """The density smoothed by a Gaussian of width σ; by default σ² = 1e-5·max(1, span), as in PyHessian."""
        low, high = self.span
        sigma = math.sqrt(1e-5 * max(1.0, high - low)) if sigma is None else sigma
        if not sigma > 0:
            raise UserError(f"sigma: {sigma} is not a positive width")
        if grid is None:
            grid = torch.linspace(low - 5 * sigma, high + 5 * sigma, points, dtype=torch.float64)
        rows = torch.stack([w @ _gauss(grid, t, sigma) for t, w in zip(self.nodes, self.weights, strict=True)])
        return Curve(grid, *_mean_and_error(rows), sigma)

    def moments(self, count: int = 4) -> tuple[Tensor, Tensor]:
        """tr(Hʲ)/P for j = 0 … count−1, and their standard errors."""
        rows = [
            torch.stack([(w * t**j).sum() for j in range(count)]) for t, w in zip(self.nodes, self.weights, strict=True)
        ]
        return _mean_and_error(torch.stack(rows))


def density(
    operator: Operator, *, starts: int = 5, steps: int = 100, seed: int = 0, progress: Progress | None = None
) -> Density:
    """Quadratures of several starts, advanced together so that each call of the operator serves all of them.

    Memory is starts × steps × P numbers. With one start the standard error is nan.
    """
    if starts < 1:
        raise UserError(f"starts: {starts}, at least 1 is needed")
    if steps < 1:
        raise UserError(f"steps: {steps}, at least 1 is needed")
    runs = [Lanczos(v) for v in random_signs(operator, starts, torch.Generator().manual_seed(seed))]
    limit = min(steps, operator.size)
    products = 0
    for step in range(limit):
        live = [run for run in runs if not run.exhausted]
        if not live:
            break
        products += len(live)
        for run, product in zip(live, operator(torch.stack([run.vector for run in live])), strict=True):
            run.advance(product)
        if progress is not None:
            progress(step + 1, limit)
    quadratures = [run.ritz() for run in runs]
    return Density([values for values, _, _ in quadratures], [s[0].square() for _, s, _ in quadratures], products)


def _gauss(grid: Tensor, nodes: Tensor, sigma: float) -> Tensor:
    """`[m, points]`: a Gaussian around each node."""
    return torch.exp(-0.5 * ((grid - nodes[:, None]) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))


def _mean_and_error(rows: Tensor) -> tuple[Tensor, Tensor]:
    error = rows.std(0) / math.sqrt(len(rows)) if len(rows) > 1 else torch.full_like(rows[0], math.nan)
    return rows.mean(0), error
