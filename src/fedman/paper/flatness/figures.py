"""Pictures of measured runs side by side, from their `flatness.json` alone. Needs matplotlib, when called."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedman.errors import UserError
from fedman.flatness.density import Density
from fedman.flatness.landscape import Landscape
from fedman.paper.flatness import record

Measured = dict[str, dict[str, Any]]  # the measurements of a model, by name


def gather(folders: Sequence[Path], models: Sequence[str]) -> dict[str, Measured]:
    """The measurements of these models of these runs, under names that tell them apart."""
    records = {folder: record.read(folder) for folder in folders}
    methods = Counter(r["run"]["method"] for r in records.values())
    found = {}
    for folder, r in records.items():
        method = r["run"]["method"]
        name = method if methods[method] == 1 else f"{method} {folder}"
        for model in models:
            if model in r["models"]:
                found[f"{name}, {model}" if len(models) > 1 else name] = r["models"][model]
    if not found:
        raise UserError(f"model: no measurement of {', '.join(models)} in {', '.join(map(str, folders))}")
    return found


def draw(measured: dict[str, Measured], out: Path) -> list[Path]:
    """Every picture these measurements allow, as PNG and SVG in `out`."""
    from fedman.flatness import plot

    paths = []

    def save(name: str, figure: Callable[[dict[str, Any]], Any], items: dict[str, Any]) -> None:
        try:
            picture = figure(items) if items else None
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{record.NAME}: {name} of {', '.join(items)} cannot be drawn ({error!r})") from None
        if picture is not None:
            paths.extend(plot.save(picture, out / f"flatness-{name}"))

    def those(name: str, read: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        found = {}
        for label, m in measured.items():
            if name in m:
                try:
                    found[label] = read(m[name])
                except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
                    raise UserError(f"{record.NAME}: {name} of {label} is damaged ({error!r})") from None
        return found

    tops = those("top", lambda top: torch.tensor(top["values"], dtype=torch.float64))
    save("top", plot.spectrum, {label: values for label, values in tops.items() if len(values) > 1})
    save("density", plot.densities, those("density", lambda d: _density(d).curve()))
    planes = those("landscape", _landscape)
    save("landscape", plot.surfaces, {label: plane for label, plane in planes.items() if plane.losses.ndim == 2})
    save("profile", plot.profiles, {label: plane for label, plane in planes.items() if plane.losses.ndim == 1})
    save("layers", plot.layers, those("layers", lambda found: found["blocks"]))
    save("clients", plot.clients, those("clients", lambda found: found))
    return paths


def _density(entry: dict[str, Any]) -> Density:
    return Density([_tensor(row) for row in entry["nodes"]], [_tensor(row) for row in entry["weights"]], 0)


def _landscape(entry: dict[str, Any]) -> Landscape:
    rows = entry["losses"]
    losses = torch.stack([_tensor(row) for row in rows]) if isinstance(rows[0], list) else _tensor(rows)
    return Landscape(_tensor(entry["offsets"]), losses, entry["samples"])


def _tensor(row: list[float | None]) -> Tensor:
    return torch.tensor([math.nan if v is None else v for v in row], dtype=torch.float64)
