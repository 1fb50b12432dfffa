"""What a run is of that its configuration cannot name: arrays and modules given in Python, a user's own files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

import numpy as np
from torch import nn

from fedman.data import SPECS, Dataset
from fedman.errors import UserError
from fedman.models.parameters import ParameterLayout

Inputs = dict[str, str]
"""Hashes by key: of "dataset" all samples and who holds them, of "model" the architecture."""


def fingerprints(data: Dataset | None, model: nn.Module | None) -> Inputs:
    """Those of data that are not fedman's own, and of a module."""
    found = {}
    if data is not None and data.name not in SPECS:
        arrays = data.x_train, data.y_train, data.x_test, data.y_test, *(data.parts or ()), *(data.test_parts or ())
        found["dataset"] = _digest(part for a in arrays for part in (f"{a.dtype}{a.shape}".encode(), _bytes(a)))
    if model is not None:
        layout, parts = ParameterLayout.of(model), re.sub(r" at 0x[0-9a-f]+", "", repr(model))
        found["model"] = _digest([f"{type(model).__qualname__} {parts} {layout.names} {layout.shapes}".encode()])
    return found


def refuse_other_inputs(where: object, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse to go on with a run, or to return its result, for other data or another model than it was made with."""
    if changed := [key for key in before if now.get(key, before[key]) != before[key]]:
        raise UserError(
            f"{where}: holds a run with another {' and another '.join(changed)} of your own; give those of the run, or "
            "choose another --out"
        )


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:12]
