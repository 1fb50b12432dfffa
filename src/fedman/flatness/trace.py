"""The trace of a symmetric operator from random probes, with its standard error.

Hutchinson: E[gᵀHg] = tr H for independent random signs g; the variance is 2 Σ_{i≠j} H_ij².
Hutch++ (Meyer, Musco, Musco & Woodruff 2021): tr H = tr QᵀHQ + tr (I−QQᵀ)H(I−QQᵀ) with Q a basis of HS for a
random sketch S. The first part, which contains the large eigenvalues, is exact; only the second part is estimated by
Hutchinson's method. Any Q that does not depend on the probes is allowed: the basis of a Lanczos recurrence on H also
captures the large eigenvalues, and tr QᵀHQ = tr T is known from it without a further product. If Q spans the whole
space, tr QᵀHQ is the trace and nothing is left to estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedman.errors import UserError
from fedman.execution.device import matmul_precision
from fedman.flatness.lanczos import Lanczos
from fedman.flatness.operator import Operator, Progress, random_signs

CONFIDENCE = 0.99
MIN_PROBES = 16
AT_ONCE = 8  # vectors in each call of the operator
ROUNDING = 16  # times ε: of tr QᵀHQ up to 8 was seen, at matrices of low rank, whose errors do not cancel


@dataclass(frozen=True)
class Trace:
    """An estimate with its standard error and two-sided confidence interval.

    The interval is Student's t for the probes, widened by the rounding 16ε Σ_i ‖Hq_i‖ of the exact part tr QᵀHQ, with ε
    the resolution of the operator's numbers. Without probes it is the rounding alone.
    """

    value: float
    error: float
    interval: tuple[float, float]
    confidence: float
    probes: int
    products: int
    converged: bool  # error ≤ rtol · |value|
    method: str


@matmul_precision("fp32")
def hutchpp(
    operator: Operator,
    *,
    sketch: int | Lanczos | None = None,
    rtol: float = 0.01,
    max_probes: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Trace:
    """Hutch++: a sketch of so many vectors (by default 16, two products each), then probes until the standard error
    is at most rtol·|estimate| or `max_probes` are used.

    `sketch` may also be the `lanczos` recurrence of `eigenpairs` on the same operator, which needs no further
    products; use a seed different from that of `eigenpairs`.
    """
    if max_probes < MIN_PROBES:
        raise UserError(f"max_probes: {max_probes}, at least {MIN_PROBES} are needed")
    if not rtol > 0:
        raise UserError(f"rtol: {rtol} is not a positive number")
    generator = torch.Generator().manual_seed(seed)
    if isinstance(sketch, Lanczos):
        rows, exact, norms, spent = sketch.basis(), sum(sketch.alpha), sketch.product_norms().sum(), 0
    else:
        rows, exact, norms, spent = _sketch(operator, min(16, operator.size) if sketch is None else sketch, generator)
    samples = torch.empty(0, dtype=torch.float64)
    value, error, converged = exact, 0.0, len(rows) == operator.size
    while not converged and len(samples) < max_probes:
        probes = random_signs(operator, min(AT_ONCE, max_probes - len(samples)), generator)
        probes = probes - (probes @ rows.T) @ rows
        samples = torch.cat([samples, (probes.double() * operator(probes).double()).sum(-1).cpu()])
        n = len(samples)
        if progress is not None:
            progress(n, max_probes)
        value, error = exact + float(samples.mean()), float(samples.std()) / math.sqrt(n)
        converged = n >= MIN_PROBES and error <= rtol * abs(value)
    probed = len(samples)
    half = ROUNDING * torch.finfo(operator.dtype).eps * max(abs(value), float(norms))
    if probed:
        half += student_t(CONFIDENCE, probed - 1) * error
    method = "hutch++" if len(rows) else "hutchinson"
    return Trace(value, error, (value - half, value + half), CONFIDENCE, probed, spent + probed, converged, method)


def hutchinson(operator: Operator, **options: Any) -> Trace:
    """Probes alone, without a sketch; `options` are those of `hutchpp`."""
    return hutchpp(operator, sketch=0, **options)


def _sketch(operator: Operator, count: int, generator: torch.Generator) -> tuple[Tensor, float, Tensor, int]:
    """An orthonormal basis Q of HS as rows q_i, tr QᵀHQ, Σ ‖Hq_i‖, and the number of products."""
    if not 0 <= count <= operator.size:
        raise UserError(f"sketch: {count} vectors; 0 to {operator.size}, the number of parameters, are allowed")
    signs = random_signs(operator, count, generator)
    if not count:
        return signs, 0.0, signs.sum(), 0
    rows = torch.linalg.qr(_chunked(operator, signs).T)[0].T.contiguous()
    products = _chunked(operator, rows).double()
    return rows, float((rows.double() * products).sum()), products.norm(dim=-1).sum(), 2 * count


def _chunked(operator: Operator, vectors: Tensor) -> Tensor:
    return torch.cat([operator(part) for part in vectors.split(AT_ONCE)])


def student_t(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's t, t = √ν tan θ with P(|T| ≤ t) = confidence, by bisection in θ.

    For ν degrees of freedom P is a finite sum (Abramowitz & Stegun 26.7.3 and 26.7.4):
    2/π (θ + sin θ (cos θ + 2/3 cos³θ + …)) for odd ν, sin θ (1 + 1/2 cos²θ + 1·3/(2·4) cos⁴θ + …) for even ν,
    up to the power ν − 2.

    >>> round(student_t(0.99, 1), 2), round(student_t(0.95, 10), 4)
    (63.66, 2.2281)
    """
    odd = freedom % 2

    def probability(theta: float) -> float:
        term, total, square = math.cos(theta) if odd else 1.0, 0.0, math.cos(theta) ** 2
        for power in range(odd, freedom - 1, 2):
            total += term
            term *= square * (power + 1) / (power + 2)
        return 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
