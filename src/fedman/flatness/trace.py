"""The trace of a symmetric operator from random probes, with its standard error.

Hutchinson: E[gᵀHg] = tr H for independent random signs g; the variance is 2 Σ_{i≠j} H_ij².
Hutch++ (Meyer, Musco, Musco & Woodruff 2021): tr H = tr QᵀHQ + tr (I−QQᵀ)H(I−QQᵀ) with Q a basis of HS for a
random sketch S. The first part, which contains the large eigenvalues, is exact; only the second part is estimated by
Hutchinson's method. Any Q that does not depend on the probes is allowed: the basis of a Lanczos recurrence on H also
captures the large eigenvalues, and tr QᵀHQ = tr T is known from it without a further product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
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


@dataclass(frozen=True)
class Trace:
    """An estimate with its standard error and two-sided confidence interval (Student's t)."""

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
        rows, exact, spent = sketch.basis(), sum(sketch.alpha), 0
    else:
        rows, exact, spent = _sketch(operator, min(16, operator.size) if sketch is None else sketch, generator)
    samples = torch.empty(0, dtype=torch.float64)
    converged = False
    while not converged and len(samples) < max_probes:
        probes = random_signs(operator, min(AT_ONCE, max_probes - len(samples)), generator)
        probes = probes - (probes @ rows.T) @ rows
        samples = torch.cat([samples, (probes.double() * operator(probes).double()).sum(-1).cpu()])
        n = len(samples)
        if progress is not None:
            progress(n, max_probes)
        value, error = exact + float(samples.mean()), float(samples.std()) / math.sqrt(n)
        converged = n >= MIN_PROBES and error <= rtol * abs(value)
    half = student_t(CONFIDENCE, n - 1) * error + torch.finfo(operator.dtype).eps * abs(value)
    method = "hutch++" if len(rows) else "hutchinson"
    return Trace(value, error, (value - half, value + half), CONFIDENCE, n, spent + n, converged, method)


def hutchinson(operator: Operator, **options: Any) -> Trace:
    """Probes alone, without a sketch; `options` are those of `hutchpp`."""
    return hutchpp(operator, sketch=0, **options)


def _sketch(operator: Operator, count: int, generator: torch.Generator) -> tuple[Tensor, float, int]:
    """An orthonormal basis Q of HS as rows, tr QᵀHQ, and the number of products."""
    if not 0 <= count <= operator.size:
        raise UserError(f"sketch: {count} vectors; 0 to {operator.size}, the number of parameters, are allowed")
    signs = random_signs(operator, count, generator)
    if not count:
        return signs, 0.0, 0
    rows = torch.linalg.qr(_chunked(operator, signs).T)[0].T.contiguous()
    return rows, float((rows.double() * _chunked(operator, rows).double()).sum()), 2 * count


def _chunked(operator: Operator, vectors: Tensor) -> Tensor:
    return torch.cat([operator(part) for part in vectors.split(AT_ONCE)])


def student_t(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's t, from the normal quantile z by the Cornish-Fisher expansion in 1/freedom.

    Within 1 % for 99 % confidence from 5 degrees of freedom on.
    """
    z, v = NormalDist().inv_cdf((1 + confidence) / 2), float(freedom)
    terms = (
        z,
        (z**3 + z) / 4 / v,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96 / v**2,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / v**3,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160 / v**4,
    )
    return sum(terms)
