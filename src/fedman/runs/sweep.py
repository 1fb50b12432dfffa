"""Run a sweep: skip finished runs, resume interrupted ones, stack what can be stacked, make a table of the results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedman.algorithms import ALGORITHMS
from fedman.config import Config
from fedman.data import Dataset
from fedman.errors import Diverged
from fedman.execution.device import pick_device
from fedman.runs import experiment
from fedman.runs.build import stackable
from fedman.runs.folder import RunFolder
from fedman.runs.grid import Cell
from fedman.runs.records import Ending
from fedman.runs.text_tables import mean_std

CLIENTS = 90  # in one stack: more clients at once are not faster


@dataclass(frozen=True)
class Row:
    """A run of a sweep that has ended."""

    cell: Cell
    accuracy: float  # of `all`, the mean of all clients' last models, in percent; NaN if the run diverged


def unfinished(grid: list[Cell], out: Path) -> list[int]:
    """The numbers of the runs that are not finished."""
    return [i for i, cell in enumerate(grid) if RunFolder(out / cell.name).finished(cell.config.flat()) is None]


def run(
    grid: list[Cell],
    data: Mapping[tuple[str, str | None], Dataset],
    out: Path,
    device: str = "auto",
    on_cell: Callable[[int, Cell], experiment.Progress] = lambda i, cell: lambda record: None,
    warn: Callable[[str], object] = lambda message: None,
) -> list[Row]:
    """Run what is not finished, on data sets by `Config.source`; the rows of all cells, in the grid's order."""
    rows = {i: _row(cell, RunFolder(out / cell.name).finished(cell.config.flat())) for i, cell in enumerate(grid)}
    left = [i for i, row in rows.items() if row is None]
    for group in groups([grid[i].config for i in left], pick_device(device)):
        members = [left[i] for i in group]
        results = experiment.run_stacked(
            [grid[i].config for i in members],
            data[grid[members[0]].config.source],
            [out / grid[i].name for i in members],
            resume=True,
            device=device,
            progress=[on_cell(i, grid[i]) for i in members],
            warn=warn,
        )
        for i, result in zip(members, results, strict=True):
            if isinstance(result, Diverged):
                warn(f"{grid[i].name}: {result}")
            rows[i] = Row(grid[i], math.nan if isinstance(result, Diverged) else result.accuracy)
    return [row for row in rows.values() if row is not None]


def _row(cell: Cell, ending: Ending | None) -> Row | None:
    if ending is None:
        return None
    return Row(cell, math.nan if "diverged" in ending else ending["accuracy"]["all"])


def groups(configs: list[Config], device: str) -> list[list[int]]:
    """Which runs to stack: on a GPU similar ones, in groups of about `CLIENTS` clients; on a CPU each alone."""
    kinds: dict[object, list[int]] = {}
    for i, config in enumerate(configs):
        kinds.setdefault(stackable(config) if device == "cuda" else i, []).append(i)
    made = []
    for members in kinds.values():
        config = configs[members[0]]
        count = max(1, round(len(members) * config.clients * config.participation / CLIENTS))
        made += [members[i * len(members) // count : (i + 1) * len(members) // count] for i in range(count)]
    return made


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Mean ± standard deviation over seeds of the accuracy of `all`, plain beside MAN: (header, rows)."""
    groups: dict[tuple[str, ...], dict[float, list[float]]] = {}
    for row in rows:
        cell = row.cell
        rest = {k: v for k, v in cell.varied.items() if k not in ("seed", "zeta", "algorithm")}
        label = (ALGORITHMS[cell.config.algorithm].title, *(f"{k}={v}" for k, v in rest.items()))
        groups.setdefault(label, {}).setdefault(cell.config.zeta, []).append(row.accuracy)
    zetas = sorted({zeta for group in groups.values() for zeta in group})
    header = ["method", *("plain" if z == 0 else f"+MAN ζ={z:g}" for z in zetas)]
    gain = 0.0 in zetas and len(zetas) == 2
    lines = []
    for label, group in groups.items():
        line = [" ".join(label), *(mean_std(group.get(z, [])) for z in zetas)]
        if gain:
            plain, man = (statistics.fmean(group.get(z) or [math.nan]) for z in zetas)
            line.append(f"{man - plain:+.2f}")
        lines.append(line)
    return [*header, "gain"] if gain else header, lines
