"""Aggregation rules by name; the first, the plain mean, is the default. A new one is a class here and a line below.

This package uses methods of tensors only and so imports without torch.
"""

from __future__ import annotations

from fedman.aggregation.base import Aggregation, Mean
from fedman.aggregation.coordinates import Median, TrimmedMean
from fedman.aggregation.distances import Krum, MultiKrum, NormClip
from fedman.parts import Registry

AGGREGATIONS = Registry(
    "aggregation",
    Aggregation,  # type: ignore[type-abstract]
    {
        "mean": Mean,
        "median": Median,
        "trimmed-mean": TrimmedMean,
        "krum": Krum,
        "multi-krum": MultiKrum,
        "norm-clip": NormClip,
    },
)

__all__ = ["AGGREGATIONS", "Aggregation", "Krum", "Mean", "Median", "MultiKrum", "NormClip", "TrimmedMean"]
