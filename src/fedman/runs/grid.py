"""The runs of a sweep: all combinations of comma lists of values, or a part of a named sweep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fedman.algorithms import ALGORITHMS
from fedman.config import KEYS, PARTS, Config, Preset, parse_value, resolve
from fedman.errors import UserError
from fedman.parts import hyperparameters

MAX_CELLS = 10_000


@dataclass(frozen=True)
class Grid:
    """Runs over all combinations of the values of `axes`, on top of the preset `base`."""

    base: Preset
    axes: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Sweep:
    """Several grids under one name."""

    name: str
    grids: tuple[Grid, ...]
    tuned: frozenset[str] = frozenset()  # keys that were chosen for each method: they do not tell methods apart


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
        """Its time in units of one round with one gradient a step."""
        return float(self.config.rounds * ALGORITHMS[self.config.algorithm].gradients_per_step)


def cells(values: Mapping[str, Any], base: Preset | Sweep | None = None) -> list[Cell]:
    """The grid over all keys that hold a comma list, on top of a preset; of a sweep, the part that the keys choose."""
    texts = {key: value.split(",") if isinstance(value, str) else value for key, value in values.items()}
    lists = {key: list(value) if isinstance(value, list | tuple) else [value] for key, value in texts.items()}
    twice = [key for key, options in lists.items() if len({repr(_value(key, v)) for v in options}) < len(options)]
    if twice:
        raise UserError(f"{twice[0]}: a value stands twice in {values[twice[0]]!r}")
    if math.prod(map(len, lists.values())) > MAX_CELLS:
        many = " x ".join(f"{len(options)} {key}" for key, options in lists.items() if len(options) > 1)
        raise UserError(f"sweep: {many} are more than the {MAX_CELLS} runs allowed")
    if isinstance(base, Sweep):
        return _part(base, lists)
    return list(_product(base, {}, lists).values())


def _value(key: str, option: object) -> object:
    """An option as the configuration holds it, where it may be one."""
    try:
        return parse_value(key, str(option))
    except UserError:
        return option


def _product(
    preset: Preset | None, axes: Mapping[str, Collection[Any]], given: Mapping[str, Collection[Any]]
) -> dict[str, Cell]:
    """All combinations by name, which tells the values of the axes and of the given keys that have several.

    A hyper-parameter of one of the algorithms is given to those that have it.
    """
    lists = {**axes, **given}
    named = {*axes, *(key for key, options in given.items() if len(options) > 1)}
    own = {(kind, name): set(hyperparameters(part)) - set(KEYS) for kind, name, part in _named_parts(lists)}
    found = set().union(*own.values())
    grid: dict[str, Cell] = {}
    for combination in itertools.product(*lists.values()):
        chosen = dict(zip(lists, combination, strict=True))
        foreign = found - set().union(*(own.get((kind, str(chosen.get(kind, ""))), set()) for kind in PARTS))
        chosen = {key: value for key, value in chosen.items() if key not in foreign}
        cell = Cell({key: v for key, v in chosen.items() if key in named}, resolve(chosen, preset))
        if grid.setdefault(cell.name, cell).config != cell.config:  # a/b and a_b
            raise UserError(
                f"sweep: two different runs would be called {cell.name}; rename a file or a module of theirs"
            )
    return grid


def _named_parts(lists: Mapping[str, Collection[Any]]) -> Iterator[tuple[str, str, type[Any]]]:
    """The parts that a grid names, by kind and name; those that do not exist are an error when a run is resolved."""
    for kind, registry in PARTS.items():
        for name in lists.get(kind, ()):
            with suppress(UserError):
                yield kind, str(name), registry[str(name)]


def _part(sweep: Sweep, lists: dict[str, list[Any]]) -> list[Cell]:
    """The runs of a named sweep. Keys it varies choose among its runs, others apply to all; seeds are free.

    A run is named by all that the sweep varies, so that parts of a sweep share one folder.
    """
    axes = {key for grid in sweep.grids for key in grid.axes} - {"seed"}
    given = {key: options for key, options in lists.items() if key not in axes}
    whole: dict[str, Cell] = {}
    for grid in sweep.grids:
        for name, cell in _product(grid.base, grid.axes, given).items():
            if whole.setdefault(name, cell).config != cell.config:
                raise UserError(f"{sweep.name}: two different runs would be called {name}")
    part = runs = [(cell, cell.config.flat()) for cell in whole.values()]
    for key in axes & lists.keys():
        has = {flat.get(key): None for _, flat in runs}
        wanted = [parse_value(key, option) for option in lists[key]]
        for value in wanted:
            if value not in has:
                there = ", ".join(f"{v:g}" if isinstance(v, float) else str(v).lower() for v in has if v is not None)
                raise UserError(f"{key}: {value!r} is no part of {sweep.name}; it has {there}")
        part = [(cell, flat) for cell, flat in part if flat.get(key) in wanted]
    if not part:
        chosen = " ".join(f"{key}={','.join(lists[key])}" for key in lists if key in axes)
        raise UserError(f"{sweep.name}: none of its runs has {chosen} together")
    return sorted((cell for cell, _ in part), key=lambda cell: cell.config.seed)
