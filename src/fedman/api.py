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

    >>> result = run(clients=10, rounds=2, algorithm="feddc", alpha=0.1, zeta=0.15)
    >>> sorted(result.models)
    ['all', 'cloud', 'sel']
    """
    arrays = from_arrays(*dataset) if isinstance(dataset, tuple | list) else dataset
    data = arrays if isinstance(arrays, Dataset) else None
    module = model if isinstance(model, nn.Module) else None
    names = {"dataset": data.name if data else arrays, "model": model if module is None else CUSTOM}
    return experiment.run(
        resolve({**keys, **{key: name for key, name in names.items() if name is not None}}, find_preset(preset)),
        data=data,
        model=module,
        out=out,
        resume=resume,
        device=device,
        progress=progress,
    )
