"""Which runs a sweep has: comma lists of values, or a table of the paper by name, whole or in part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fedman.algorithms import ALGORITHMS, hyperparameters
from fedman.config import HYPERPARAMETERS, Config, parsed, resolve
from fedman.errors import UserError, nearest
from fedman.paper.presets import PRESETS, SWEEPS

MAX_CELLS = 10_000


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: the keys that tell it from the others, and its whole configuration."""

    varied: dict[str, Any]
    config: Config

    @property
    def name(self) -> str:
        """The name of its folder."""
        words = [f"{value}" if key in ("algorithm", "partition", "dataset") else f"{key}{value}"
                 for key, value in self.varied.items()]  # fmt: skip
        return "-".join(words).replace("/", "_").replace(":", "_") or "run"

    @property
    def cost(self) -> float:
        """Its time in units of one round with one gradient a step; an ascent (ρ) takes a second gradient."""
        return self.config.rounds * (2.0 if "rho" in self.config.hyper else 1.0)


def cells(values: Mapping[str, Any], preset: str | None) -> list[Cell]:
    """The grid over all keys that hold a comma list; of a sweep by name, the part these keys leave."""
    lists = {key: value.split(",") if isinstance(value, str) else _listed(value) for key, value in values.items()}
    twice = [key for key, options in lists.items() if len(set(map(str, options))) < len(options)]
    if twice:
        raise UserError(f"{twice[0]}: a value stands twice in {values[twice[0]]!r}")
    if math.prod(map(len, lists.values())) > MAX_CELLS:
        many = " x ".join(f"{len(options)} {key}" for key, options in lists.items() if len(options) > 1)
        raise UserError(f"sweep: {many} are more than the {MAX_CELLS} runs allowed")
    if preset in SWEEPS:
        return _part(preset, lists)
    if preset is not None and preset not in PRESETS:
        raise UserError(f"preset: no preset named {preset!r}{nearest(preset, [*PRESETS, *SWEEPS])}")
    return _product(lists, preset, [key for key in lists if len(lists[key]) > 1])


def _product(lists: Mapping[str, Collection[Any]], preset: str | None, named: Collection[str]) -> list[Cell]:
    """All combinations, told apart by the keys in `named`.

    A hyper-parameter is given to the algorithms that have it and must belong to one of them at least.
    """
    algorithms = [a for a in lists.get("algorithm", ["fedavg"]) if a in ALGORITHMS]
    for key in lists.keys() & set(HYPERPARAMETERS):
        if algorithms and not any(key in hyperparameters(a) for a in algorithms):
            raise UserError(f"{key}: none of {', '.join(algorithms)} has this hyper-parameter")
    grid: dict[str, Cell] = {}
    for combination in itertools.product(*lists.values()):
        chosen = dict(zip(lists, combination, strict=True))
        algorithm = chosen.get("algorithm", "fedavg")
        own = hyperparameters(algorithm) if algorithm in ALGORITHMS else HYPERPARAMETERS
        chosen = {key: value for key, value in chosen.items() if key not in HYPERPARAMETERS or key in own}
        cell = Cell({key: v for key, v in chosen.items() if key in named}, resolve(chosen, preset))
        grid.setdefault(cell.name, cell)
    return list(grid.values())


def _part(sweep: str, lists: dict[str, list[Any]]) -> list[Cell]:
    """The runs of a named sweep. Keys it varies choose among its runs, others hold for all; seeds are free.

    A run is named by all that the sweep varies, so that parts of a sweep share one folder.
    """
    grids = SWEEPS[sweep]
    axes = {key for grid in grids for key in grid.axes} - {"seed"}
    whole: dict[str, Cell] = {}
    for grid in grids:
        given = {key: options for key, options in lists.items() if key not in axes}
        named = [*grid.axes, *(key for key, options in given.items() if len(options) > 1)]
        whole |= {cell.name: cell for cell in _product({**grid.axes, **given}, grid.base, named)}
    part = list(whole.values())
    for key in axes & lists.keys():
        has = {getattr(cell.config, key): None for cell in whole.values()}
        wanted = [parsed(key, option) for option in lists[key]]
        for value in wanted:
            if value not in has:
                there = ", ".join(f"{v:g}" if isinstance(v, float) else str(v).lower() for v in has if v is not None)
                raise UserError(f"{key}: {value!r} is no part of {sweep}; it has {there}")
        part = [cell for cell in part if getattr(cell.config, key) in wanted]
    if not part:
        chosen = " ".join(f"{key}={','.join(lists[key])}" for key in lists if key in axes)
        raise UserError(f"{sweep}: none of its runs has {chosen} together")
    return sorted(part, key=lambda cell: cell.config.seed)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
