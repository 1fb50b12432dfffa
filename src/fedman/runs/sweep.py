"""Run a sweep: skip finished runs, resume interrupted ones, stack what can be stacked, make a table of the results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedman.algorithms import ALGORITHMS
from fedman.config import Config
from fedman.data import Dataset
from fedman.errors import Diverged
from fedman.execution.device import pick_device
from fedman.penalties import PENALTIES
from fedman.runs.build import stackable
from fedman.runs.experiment import run_stacked
from fedman.runs.folder import RunFolder
from fedman.runs.grid import Cell
from fedman.runs.records import Progress, headline
from fedman.runs.text_tables import mean_std

CLIENTS = 90  # in one stack: more clients at once are not faster


def unfinished(grid: list[Cell], out: Path) -> list[int]:
    """The numbers of the runs that are not finished."""
    return [i for i, cell in enumerate(grid) if RunFolder(out / cell.name).finished(cell.config.flat()) is None]


def run(
    cells: Sequence[Cell],
    data: Mapping[tuple[str, str | None], Dataset],
    out: Path,
    device: str,
    progress: Sequence[Progress],
    warn: Callable[[str], object],
) -> None:
    """Run these cells, each from its last checkpoint, on data sets by `Config.source`."""
    for numbers in groups([cell.config for cell in cells], pick_device(device)):
        group = [cells[i] for i in numbers]
        configs, outs = [cell.config for cell in group], [out / cell.name for cell in group]
        say = [progress[i] for i in numbers]
        results = run_stacked(
            configs, data[configs[0].source], outs, resume=True, device=device, progress=say, warn=warn
        )
        for cell, result in zip(group, results, strict=True):
            if isinstance(result, Diverged):
                warn(f"{cell.name}: {result}")


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


def table(grid: list[Cell], out: Path) -> tuple[list[str], list[list[str]]]:
    """Mean ± standard deviation over seeds of the headline of `all`, plain beside each penalty: (header, rows)."""
    groups: dict[tuple[str, ...], dict[float, list[float]]] = {}
    for cell in grid:
        ending = RunFolder(out / cell.name).ending()
        rest = {k: v for k, v in cell.varied.items() if k not in ("seed", "zeta", "algorithm")}
        label = (ALGORITHMS[cell.config.algorithm].title, *(f"{k}={v}" for k, v in rest.items()))
        if ending is not None:
            groups.setdefault(label, {}).setdefault(cell.config.zeta, []).append(headline(ending))
    penalties = {PENALTIES[cell.config.penalty].title for cell in grid}
    added = penalties.pop() if len(penalties) == 1 else "penalty"
    zetas = sorted({zeta for group in groups.values() for zeta in group})
    header = ["method", *("plain" if z == 0 else f"+{added} ζ={z:g}" for z in zetas)]
    gain = 0.0 in zetas and len(zetas) == 2
    lines = []
    for label, group in groups.items():
        line = [" ".join(label), *(mean_std(group.get(z, [])) for z in zetas)]
        if gain:
            plain, man = (statistics.fmean(group.get(z) or [math.nan]) for z in zetas)
            line.append(f"{man - plain:+.2f}")
        lines.append(line)
    return [*header, "gain"] if gain else header, lines
