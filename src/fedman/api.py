"""`fedman.run`: a run in one Python call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from fedman.config import CUSTOM, resolve
from fedman.data import Dataset, from_arrays
from fedman.paper.presets import find_preset
from fedman.runs import experiment


def run(
    *,
    dataset: str | Dataset | tuple[Any, Any, Any, Any] | None = None,
    model: str | nn.Module | None = None,
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
    The other keys are those of `fedman run`, the algorithm's hyper-parameters among them; `fedman list` explains them.
    What is not given is the preset's value, or the default.

    >>> result = run(dataset="digits", clients=10, rounds=2, algorithm="feddc", alpha=0.1, zeta=0.15)
    >>> sorted(result.models)
    ['all', 'cloud', 'sel']
    """
    own_data = from_arrays(*dataset) if isinstance(dataset, tuple | list) else dataset
    if isinstance(own_data, Dataset):
        keys["dataset"] = own_data.name
    elif own_data is not None:
        keys["dataset"] = own_data
    if model is not None:
        keys["model"] = CUSTOM if isinstance(model, nn.Module) else model
    return experiment.run(
        resolve(keys, find_preset(preset)),
        data=own_data if isinstance(own_data, Dataset) else None,
        model=model if isinstance(model, nn.Module) else None,
        out=out,
        resume=resume,
        device=device,
        progress=progress,
    )
