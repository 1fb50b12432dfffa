"""Extreme eigenpairs of a symmetric operator by Lanczos with full re-orthogonalisation.

After m products H Q = Q T + β_m q_{m+1} e_mᵀ with orthonormal columns Q and T tridiagonal. An eigenpair (θ, s) of T
gives the Ritz pair (θ, Qs) of H, whose residual is known without a further product: ‖H Qs − θ Qs‖ = β_m |s_m|.
Some eigenvalue of H lies within the residual of θ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedman.errors import UserError
from fedman.execution.device import matmul_precision
from fedman.flatness.operator import Operator, Progress

BLOCK = 32  # rows of the basis allocated at a time: memory grows with the steps taken


class Lanczos:
    """The recurrence: multiply `vector` by H, pass the product to `advance`, repeat until `exhausted`."""

    def __init__(self, start: Tensor, against: Tensor | None = None) -> None:
        """With orthonormal rows `against` `[j, P]` the recurrence is that of H on their orthogonal complement."""
        self.alpha: list[float] = []
        self.beta: list[float] = []
        self.exhausted = False  # the basis spans an invariant subspace
        self._blocks: list[Tensor] = []
        self._rows = 0
        self._against = start.new_zeros(0, len(start)) if against is None else against
        self.dimension = len(start) - len(self._against)  # of the space in which the basis grows
        self.restart(start)

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
        self.exhausted = self._rows == self.dimension or beta <= 10 * torch.finfo(rest.dtype).eps * scale
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

    def product_norms(self) -> Tensor:
        """‖Hq_i‖ `[m]`: Hq_i = β_{i−1} q_{i−1} + α_i q_i + β_i q_{i+1}."""
        alpha, beta = (torch.tensor(t, dtype=torch.float64) for t in (self.alpha, self.beta))
        before = torch.cat([beta.new_zeros(1), beta[:-1]])
        return (alpha.square() + beta.square() + before.square()).sqrt()

    def _append(self, row: Tensor) -> None:
        if self._rows % BLOCK == 0:
            self._blocks.append(row.new_zeros(BLOCK, len(row)))
        self._rows += 1
        self.vector.copy_(row)

    @matmul_precision("fp32")
    def _orthogonalise(self, vector: Tensor) -> Tensor:
        for _ in range(2):  # Gram-Schmidt twice is orthogonal to rounding
            for block in (self._against, *self._blocks):
                vector = vector - block.T @ (block @ vector)
        return vector


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues in descending order with unit eigenvectors and residuals ‖Hv − λv‖."""

    values: Tensor  # [k] float64 on the CPU
    vectors: Tensor  # [k, P]
    residuals: Tensor  # [k]
    converged: Tensor  # [k] bool: residual ≤ tol · max|λ|, and no eigenvalue is missing before it
    products: int
    lanczos: Lanczos  # the recurrence that found the first copy of each

    def check(self, operator: Operator) -> Tensor:
        """‖Hv − λv‖ `[k]` measured with k further products."""
        return _residuals(operator, self.values, self.vectors)


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
    """The k largest eigenvalues ("top"), or k of each end of the spectrum ("both", 2k in all), by multiplicity.

    Stops when every wanted residual is at most tol·max|λ| and no wanted value has moved by more than that since the
    last check, at least five products ago (a small residual alone does not tell whether a larger eigenvalue is still
    missing).

    One recurrence finds one copy of a multiple eigenvalue, and of a tight cluster possibly too few. If k > 1, further
    recurrences therefore look for the outermost eigenvalues on the orthogonal complement of the vectors found, add
    those that belong between them, and repeat until there are none.

    All take at most `max_steps` products (by default 4 for each wanted value, plus 100, and as many again for further
    recurrences). `converged` says which pairs meet the tolerance; where the products did not suffice to exclude that
    some are missing, only the outermost can. Memory is steps × P numbers.

    >>> class Diagonal:
    ...     size, dtype, device = 4, torch.float64, torch.device("cpu")
    ...     def __call__(self, vectors):
    ...         return vectors * torch.tensor([5.0, 5, 5, 4], dtype=torch.float64)
    >>> eigenpairs(Diagonal(), 2).values.round(decimals=9)
    tensor([5., 5.], dtype=torch.float64)
    """
    wanted = 2 * k if ends == "both" else k
    if k < 1 or wanted > operator.size:
        most = operator.size // (2 if ends == "both" else 1)
        raise UserError(f"k: {k} eigenvalues of a {operator.size}x{operator.size} matrix; 1 to {most} are allowed")
    if ends not in ("top", "both"):
        raise UserError(f"ends: {ends!r} is neither top nor both")
    steps = 4 * wanted + 100 if max_steps is None else max_steps
    if steps < wanted:
        raise UserError(f"max_steps: {max_steps} products cannot give {wanted} eigenvalues; at least {wanted} needed")
    search = _Search(operator, ends, seed, min(steps, operator.size), progress)
    first = Lanczos(search.start())
    found = search.advance(first, lambda values: search.outermost(values, k), lambda scale: tol * scale, wanted)
    complete = k == 1 or first.steps == operator.size  # nothing can be missing
    search.limit = 2 * steps if max_steps is None else max_steps
    while found.settled and not complete and search.products < search.limit:
        rest = search.complement(found, k)
        complete = rest.settled and not len(rest.values)
        found = search.merge(found, rest, k)
    good = found.residuals <= found.accuracy
    if not complete:
        good[1 : -1 if ends == "both" else None] = False
    return Eigenpairs(found.values, found.vectors, found.residuals, good, search.products, first)


@dataclass(frozen=True)
class _Found:
    """Ritz pairs in descending order. `settled`: their residuals and last changes are within `accuracy`."""

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    accuracy: float
    settled: bool

    def take(self, index: Tensor) -> _Found:
        """The pairs at these indices."""
        vectors = self.vectors[index.to(self.vectors.device)]
        return replace(self, values=self.values[index], vectors=vectors, residuals=self.residuals[index])


class _Search:
    """Recurrences on one operator that share a limit of products and a generator of random starts."""

    def __init__(
        self, operator: Operator, ends: Literal["top", "both"], seed: int, limit: int, progress: Progress | None
    ) -> None:
        self.operator, self.ends, self.limit, self.progress = operator, ends, limit, progress
        self.generator = torch.Generator().manual_seed(seed)
        self.products = 0

    def start(self) -> Tensor:
        """A random vector `[P]`."""
        return torch.randn(self.operator.size, generator=self.generator).to(self.operator.device, self.operator.dtype)

    def outermost(self, values: Tensor, k: int) -> Tensor:
        """Of descending values the indices of the k largest, or of k at each end."""
        low = range(max(k, len(values) - k), len(values)) if self.ends == "both" else ()
        return torch.tensor([*range(min(k, len(values))), *low])

    def advance(
        self,
        lanczos: Lanczos,
        choose: Callable[[Tensor], Tensor],
        accuracy: Callable[[float], float],
        least: int = 1,
    ) -> _Found:
        """Take products, at least so many, until the chosen Ritz pairs have settled or the limit is reached.

        `choose` gives indices of descending Ritz values, `accuracy` what is accurate enough for the largest |θ|.
        """
        check_at, last = least, torch.empty(0)
        while True:
            lanczos.advance(self.operator(lanczos.vector[None])[0])
            self.products += 1
            if self.progress is not None:
                self.progress(self.products, self.limit)
            m = lanczos.steps
            whole = m == lanczos.dimension
            if whole or self.products >= self.limit or m >= check_at or (lanczos.exhausted and m >= least):
                values, vectors, residuals = (t.flip(-1) for t in lanczos.ritz())
                near, chosen = accuracy(float(values.abs().max())), choose(values)
                same = len(chosen) == len(last) and bool(((values[chosen] - last).abs() <= near).all())
                settled = whole or (same and bool((residuals[chosen] <= near).all()))
                if settled or self.products >= self.limit:
                    return _Found(values[chosen], lanczos.lift(vectors[:, chosen]), residuals[chosen], near, settled)
                check_at, last = m + max(5, m // 20), values[chosen]
            if lanczos.exhausted:
                lanczos.restart(self.start())

    def complement(self, found: _Found, k: int) -> _Found:
        """What the k pairs of an end lack: eigenpairs orthogonal to all found and further out than the k-th."""
        high, low = found.values[k - 1] + found.accuracy, found.values[-k] - found.accuracy

        def missing(values: Tensor) -> Tensor:
            beyond = values > high
            return (beyond | (values < low) if self.ends == "both" else beyond).nonzero()[:, 0]

        def missing_or_outermost(values: Tensor) -> Tensor:
            beyond = missing(values)
            return beyond if len(beyond) else self.outermost(values, 1)

        lanczos = Lanczos(self.start(), found.vectors)
        rest = self.advance(lanczos, missing_or_outermost, lambda scale: found.accuracy)
        return rest.take(missing(rest.values))

    def merge(self, found: _Found, rest: _Found, k: int) -> _Found:
        """The k outermost pairs of both; the residuals of `rest` are measured, since its recurrence was H's in part."""
        if not len(rest.values):
            return found
        self.products += len(rest.values)
        both = replace(
            found,
            values=torch.cat([found.values, rest.values]),
            vectors=torch.cat([found.vectors, rest.vectors]),
            residuals=torch.cat([found.residuals, _residuals(self.operator, rest.values, rest.vectors)]),
        )
        both = both.take(both.values.argsort(descending=True))
        return both.take(self.outermost(both.values, k))


def _residuals(operator: Operator, values: Tensor, vectors: Tensor) -> Tensor:
    """‖Hv − λv‖ of every pair, by as many products."""
    rest = operator(vectors) - values.to(vectors)[:, None] * vectors
    return rest.norm(dim=-1).double().cpu()
