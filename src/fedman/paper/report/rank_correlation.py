"""Rank correlation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's ρ; None for fewer than three pairs, or where one of the two does not vary."""
    if len(pairs) < 3 or any(len(set(values)) < 2 for values in zip(*pairs, strict=True)):
        return None
    one, other = (_ranks(values) for values in zip(*pairs, strict=True))
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks, ties sharing their mean: Spearman's coefficient is the correlation of these."""
    v = np.asarray(values)
    return np.array([(v < x).sum() + ((v == x).sum() + 1) / 2 for x in v])
