"""What a run is of that its configuration cannot name: arrays and modules given in Python, a user's own files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from fedman.data import SPECS, Dataset
from fedman.errors import UserError
from fedman.execution.base import check_model
from fedman.models.parameters import ParameterLayout

Inputs = dict[str, str]
"""Hashes by key: of "dataset" all samples and who holds them, of "model" the architecture."""


def fingerprints(data: Dataset | None, model: nn.Module | None, given: bool = False) -> Inputs:
    """Those of data that are not fedman's own, or were `given` in Python under whatever name, and of a module. Weights
    that are trained may be others; what is constant may not."""
    found = {}
    if data is not None and (given or data.name not in SPECS):
        arrays = data.x_train, data.y_train, data.x_test, data.y_test, *(data.parts or ()), *(data.test_parts or ())
        found["dataset"] = _digest(f"{data.classes} {data.mean} {data.std} {data.ids}", arrays)
    if model is not None:
        check_model(model)
        model = getattr(model, "_orig_mod", model)  # torch.compile's
        changes = {*ParameterLayout.of(model).names, *ParameterLayout.of_buffers(model).names}
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        text = f"{type(model).__qualname__} {re.sub(r' at 0x[0-9a-f]+', '', repr(model))}"
        text += "".join(f" {name} {tuple(v.shape)}" for name, v in named.items())
        constant = (part for name, v in named.items() if name not in changes for part in _entries(v.detach().cpu()))
        found["model"] = _digest(text, (v.flatten().view(torch.uint8).numpy() for v in constant))
    return found


def _entries(v: Tensor) -> list[Tensor]:
    """A tensor, of a sparse one (the edges of a large graph) its entries and where they are."""
    if v.layout is torch.strided:
        return [v]
    sparse = v.to_sparse_coo().coalesce()
    return [sparse.indices(), sparse.values()]


def refuse_other_inputs(where: object, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse to go on with a run, or to return its result, for other data or another model than it was made with."""
    if changed := [key for key in before if now.get(key, before[key]) != before[key]]:
        raise UserError(
            f"{where}: holds a run with another {' and another '.join(changed)} of your own; give those of the run, or "
            "choose another --out"
        )


def _digest(text: str, arrays: Iterable[np.ndarray]) -> str:
    found = hashlib.sha256(text.encode())
    for array in arrays:
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:12]
