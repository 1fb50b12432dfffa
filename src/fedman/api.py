"""`fedman.run`: a run in one Python call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fedman.config import CUSTOM, resolve
from fedman.data import Dataset, from_arrays
from fedman.runs import experiment


def run(
    *,
    dataset: str | Dataset | tuple[Any, Any, Any, Any] = "digits",
    model: str | nn.Module = "",
    preset: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: experiment.Progress = lambda record: None,
    **keys: Any,
) -> experiment.Result:
    """Train a federation and return its records and models.

    `dataset`: a name, or your own arrays (x_train, y_train, x_test, y_test), or a `fedman.data.Dataset`.
    `model`: a name, or your own `nn.Module`, whose weights are the start.
    The other keys are those of `fedman run`; `fedman list` explains them.

    >>> result = run(dataset="digits", clients=10, rounds=2, algorithm="feddc", zeta=0.15)
    >>> sorted(result.models)
    ['all', 'cloud', 'sel']
    """
    data = None
    if not isinstance(dataset, str):
        data = dataset if isinstance(dataset, Dataset) else from_arrays(*dataset)
        keys["dataset"] = data.name
    elif preset is None or dataset != "digits":
        keys["dataset"] = dataset
    own = model if isinstance(model, nn.Module) else None
    if own is not None or model:
        keys["model"] = CUSTOM if own is not None else model
    return experiment.run(
        resolve(keys, preset), data=data, model=own, out=out, resume=resume, device=device, progress=progress
    )
