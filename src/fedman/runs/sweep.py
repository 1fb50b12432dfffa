"""A grid of runs: done ones skipped, half-done ones resumed, a table at the end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedman.algorithms import ALGORITHMS
from fedman.config import Config
from fedman.data import Dataset
from fedman.errors import Diverged
from fedman.execution.device import pick_device
from fedman.paper.presets import SWEEPS
from fedman.runs import experiment
from fedman.runs.build import stackable
from fedman.runs.folder import finished, write_text
from fedman.runs.grid import Cell, cells
from fedman.runs.text_tables import markdown, mean_std

CLIENTS = 90  # in one chunk: more no longer make a client cheaper


def command(
    given: Mapping[str, Any], preset: str | None, out: Path | None, device: str, say: Callable[[str], object]
) -> None:
    """`fedman sweep`: run what is left of a grid and print its table."""
    from fedman.cli.progress import data_progress, print_table, sweep_progress
    from fedman.data import load

    grid = cells(given, preset)
    out = out or Path("runs") / (preset if preset in SWEEPS else "sweep")
    left = unfinished(grid, out)
    if len(left) < len(grid):
        say(f"{len(grid) - len(left)} of {len(grid)} runs are done already")
    with data_progress() as reading:
        data = {source: load(*source, reading) for source in {grid[i].config.source for i in left}}
    with sweep_progress({i: (grid[i].config.rounds, grid[i].cost) for i in left}, len(grid)) as on_cell:
        rows = run(grid, data, out, device, lambda i, cell: on_cell(i, cell.name), say)
    header, lines = table(rows)
    print_table(f"test accuracy of the mean of all clients, %, {out}", header, lines)
    write_text(out / "table.md", markdown(header, lines))


def unfinished(grid: list[Cell], out: Path) -> list[int]:
    """Which cells there is work left for."""
    return [i for i, cell in enumerate(grid) if finished(out / cell.name, cell.config.flat()) is None]


def run(
    grid: list[Cell],
    data: Mapping[tuple[str, str | None], Dataset],
    out: Path,
    device: str = "auto",
    on_cell: Callable[[int, Cell], experiment.Progress] = lambda i, cell: lambda record: None,
    warn: Callable[[str], object] = lambda message: None,
) -> list[dict[str, Any]]:
    """Run what is not done yet, on data sets by `Config.source`; the rows of all cells, in the grid's order."""
    rows = [finished(out / cell.name, cell.config.flat()) for cell in grid]
    left = [i for i, row in enumerate(rows) if row is None]
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
                rows[i] = {"diverged": str(result)}
            else:
                rows[i] = result.summary
    return [{**row, "cell": cell} for row, cell in zip(rows, grid, strict=True) if row is not None]


def groups(configs: list[Config], device: str) -> list[list[int]]:
    """Which runs to stack: on a GPU those of a kind, in groups of about `CLIENTS` clients; on a CPU each alone."""
    kinds: dict[object, list[int]] = {}
    for i, config in enumerate(configs):
        kinds.setdefault(stackable(config) if device == "cuda" else i, []).append(i)
    made = []
    for members in kinds.values():
        config = configs[members[0]]
        count = max(1, round(len(members) * config.clients * config.participation / CLIENTS))
        made += [members[i * len(members) // count : (i + 1) * len(members) // count] for i in range(count)]
    return made


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Mean ± standard deviation over seeds of the accuracy of `all`, plain beside MAN: (header, rows)."""
    groups: dict[tuple[str, ...], dict[float, list[float]]] = {}
    for row in rows:
        cell: Cell = row["cell"]
        rest = {k: v for k, v in cell.varied.items() if k not in ("seed", "zeta", "algorithm")}
        label = (ALGORITHMS[cell.config.algorithm].title, *(f"{k}={v}" for k, v in rest.items()))
        accuracy = math.nan if "diverged" in row else row["accuracy"]["all"]
        groups.setdefault(label, {}).setdefault(cell.config.zeta, []).append(accuracy)
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
