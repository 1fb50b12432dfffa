"""Extreme eigenpairs of a symmetric operator by Lanczos with full re-orthogonalisation.

After m products H Q = Q T + β_m q_{m+1} e_mᵀ with orthonormal columns Q and T tridiagonal. An eigenpair (θ, s) of T
gives the Ritz pair (θ, Qs) of H, whose residual is known without a further product: ‖H Qs − θ Qs‖ = β_m |s_m|.
Some eigenvalue of H lies within the residual of θ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedman.errors import UserError
from fedman.execution.device import matmul_precision
from fedman.flatness.operator import Operator, Progress

BLOCK = 32  # rows of the basis allocated at a time: memory grows with the steps taken


class Lanczos:
    """The recurrence: multiply `vector` by H, pass the product to `advance`, repeat until `exhausted`."""

    def __init__(self, start: Tensor) -> None:
        self.alpha: list[float] = []
        self.beta: list[float] = []
        self.exhausted = False  # the basis spans an invariant subspace
        self._blocks: list[Tensor] = []
        self._rows = 0
        self._append(start / start.norm())

    @property
    def steps(self) -> int:
        """m, the number of products taken."""
        return len(self.alpha)

    @property
    def vector(self) -> Tensor:
        """q_{m+1} `[P]`, the next vector to be multiplied."""
        return self._blocks[-1][(self._rows - 1) % BLOCK]

    def advance(self, product: Tensor) -> None:
        """Take H q_{m+1}: α = qᵀHq, then the part of Hq outside the basis becomes the next vector."""
        self.alpha.append(float(self.vector.double() @ product.double()))
        rest = self._orthogonalise(product)
        beta = float(rest.norm())
        scale = max(map(abs, self.alpha + self.beta))
        self.exhausted = self._rows == len(rest) or beta <= 10 * torch.finfo(rest.dtype).eps * scale
        self.beta.append(0.0 if self.exhausted else beta)
        if not self.exhausted:
            self._append(rest / beta)

    def restart(self, start: Tensor) -> None:
        """Leave an invariant subspace: continue from the part of `start` outside of it."""
        rest = self._orthogonalise(start)
        self._append(rest / rest.norm())
        self.exhausted = False

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """T's eigenvalues θ `[m]` in ascending order, its eigenvectors s `[m, m]` (columns), residuals `[m]`."""
        off = torch.tensor(self.beta[:-1], dtype=torch.float64)
        tridiagonal = torch.diag(torch.tensor(self.alpha, dtype=torch.float64)) + off.diag(1) + off.diag(-1)
        values, vectors = torch.linalg.eigh(tridiagonal)
        return values, vectors, self.beta[-1] * vectors[-1].abs()

    @matmul_precision("fp32")
    def lift(self, coefficients: Tensor) -> Tensor:
        """Rows Qs `[k, P]` of columns s `[m, k]`."""
        parts = coefficients.to(self._blocks[0]).split(BLOCK)
        total = self._blocks[0].new_zeros(coefficients.shape[1], self._blocks[0].shape[1])
        for block, part in zip(self._blocks, parts, strict=False):
            total.addmm_(part.T, block[: len(part)])
        return total

    def basis(self) -> Tensor:
        """Q `[m, P]`, the orthonormal rows that have been multiplied; tr QHQᵀ is the sum of `alpha`."""
        return torch.cat(self._blocks)[: self.steps]

    def _append(self, row: Tensor) -> None:
        if self._rows % BLOCK == 0:
            self._blocks.append(row.new_zeros(BLOCK, len(row)))
        self._rows += 1
        self.vector.copy_(row)

    @matmul_precision("fp32")
    def _orthogonalise(self, vector: Tensor) -> Tensor:
        for _ in range(2):  # Gram-Schmidt twice is orthogonal to rounding
            for block in self._blocks:
                vector = vector - block.T @ (block @ vector)
        return vector


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues in descending order with unit eigenvectors and residuals ‖Hv − λv‖."""

    values: Tensor  # [k] float64 on the CPU
    vectors: Tensor  # [k, P]
    residuals: Tensor  # [k], of the recurrence
    converged: Tensor  # [k] bool: residual ≤ tol · max|λ|
    products: int
    lanczos: Lanczos  # the recurrence they come from

    def check(self, operator: Operator) -> Tensor:
        """‖Hv − λv‖ `[k]` measured with k further products."""
        rest = operator(self.vectors) - self.values.to(self.vectors)[:, None] * self.vectors
        return rest.norm(dim=-1).double().cpu()


def eigenpairs(
    operator: Operator,
    k: int = 1,
    *,
    ends: Literal["top", "both"] = "top",
    tol: float = 1e-4,
    max_steps: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Eigenpairs:
    """The k largest eigenvalues ("top"), or k of each end of the spectrum ("both", 2k in all).

    Stops when every wanted residual is at most tol·max|λ| and no wanted value has moved by more than that since the
    last check, at least five products ago (a small residual alone does not tell whether a larger eigenvalue is still
    missing), or after `max_steps` products (by default 4 for each wanted value, plus 100); `converged` says which
    pairs meet the tolerance. Memory is steps × P numbers. A multiple eigenvalue is found once.
    """
    wanted = 2 * k if ends == "both" else k
    if k < 1 or wanted > operator.size:
        most = operator.size // (2 if ends == "both" else 1)
        raise UserError(f"k: {k} eigenvalues of a {operator.size}x{operator.size} Hessian; 1 to {most} are allowed")
    if ends not in ("top", "both"):
        raise UserError(f"ends: {ends!r} is neither top nor both")
    limit = min(operator.size, 4 * wanted + 100 if max_steps is None else max_steps)
    if limit < wanted:
        raise UserError(f"max_steps: {max_steps} products cannot give {wanted} eigenvalues; at least {wanted} needed")

    generator = torch.Generator().manual_seed(seed)

    def fresh() -> Tensor:
        return torch.randn(operator.size, generator=generator).to(operator.device, operator.dtype)

    lanczos = Lanczos(fresh())
    check_at, last = wanted, torch.full((wanted,), torch.inf, dtype=torch.float64)
    while True:
        lanczos.advance(operator(lanczos.vector[None])[0])
        m = lanczos.steps
        if progress is not None:
            progress(m, limit)
        if m == limit or (m >= wanted and (m >= check_at or lanczos.exhausted)):
            values, vectors, residuals = lanczos.ritz()
            chosen = torch.tensor([*range(k), *range(m - k, m)][-wanted:]).flip(0)
            accuracy = tol * float(values.abs().max())
            good = residuals[chosen] <= accuracy
            settled = bool(((values[chosen] - last).abs() <= accuracy).all())
            if m == limit or (settled and bool(good.all())):
                break
            check_at, last = m + max(5, m // 20), values[chosen]
        if lanczos.exhausted:
            lanczos.restart(fresh())
    return Eigenpairs(values[chosen], lanczos.lift(vectors[:, chosen]), residuals[chosen], good, m, lanczos)
