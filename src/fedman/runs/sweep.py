"""Run a sweep: skip finished runs, resume interrupted ones, stack what can be stacked, make a table of the results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from fedman.runs.records import Ending, Headline, Progress, evaluated_on, headline
from fedman.runs.text_tables import mean_std
from fedman.tasks import TASKS

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


@dataclass(frozen=True)
class Table:
    """A table of a sweep's runs, its rows as text."""

    title: str
    header: list[str]
    rows: list[list[str]]


def tables(grid: list[Cell], out: Path) -> list[Table]:
    """The headline of `all`, and where clients have test samples of their own, what it is there."""
    methods: dict[str, list[tuple[Cell, Ending]]] = {}
    names = {cell.config.algorithm for cell in grid}
    titles = {name: ALGORITHMS[name].title for name in names}
    for cell in grid:
        if (ending := RunFolder(out / cell.name).ending()) is not None:
            title = titles[cell.config.algorithm]
            unique = list(titles.values()).count(title) == 1
            rest = {k: v for k, v in cell.varied.items() if k not in ("seed", "zeta", "algorithm")}
            label = [title if unique else cell.config.algorithm, *(f"{k}={v}" for k, v in rest.items())]
            methods.setdefault(" ".join(label), []).append((cell, ending))
    made = [_headlines(grid, methods), _clients(grid, methods)]
    return [each for each in made if each.rows]


def _headlines(grid: list[Cell], methods: Mapping[str, list[tuple[Cell, Ending]]]) -> Table:
    """Mean ± standard deviation over seeds, plain beside each penalty; a gain is positive where it is better."""
    penalties = {PENALTIES[cell.config.penalty].title for cell in grid}
    added = penalties.pop() if len(penalties) == 1 else "penalty"
    zetas = sorted({cell.config.zeta for ended in methods.values() for cell, _ in ended})
    header = ["method", *("plain" if z == 0 else f"+{added} ζ={z:g}" for z in zetas)]
    gain = 0.0 in zetas and len(zetas) == 2
    rows = []
    for label, ended in methods.items():
        compared = _headline(ended[0][0])
        values = [[headline(ending) for cell, ending in ended if cell.config.zeta == z] for z in zetas]
        means = [statistics.fmean(group or [math.nan]) for group in values]
        row = [label, *(mean_std(v, compared.form(m)) for v, m in zip(values, means, strict=True))]
        if gain:
            row.append(f"{compared.gain(*means):+{compared.form(*means)}}")
        rows.append(row)
    return Table(_title(grid, " of the mean of all clients"), [*header, "gain"] if gain else header, rows)


def _clients(grid: list[Cell], methods: Mapping[str, list[tuple[Cell, Ending]]]) -> Table:
    """Mean, worst tenth and spread over clients, each the mean ± standard deviation over seeds."""
    rows = []
    for label, ended in methods.items():
        for zeta in sorted({cell.config.zeta for cell, _ in ended}):
            runs = [ending for cell, ending in ended if cell.config.zeta == zeta]
            found = [run["clients"] for run in runs if "diverged" not in run and "clients" in run]
            if found:
                columns = [[c["mean"] for c in found], [c["worst_tenth"] for c in found], [c["spread"] for c in found]]
                form = _headline(ended[0][0]).form(*columns[0])
                rows.append([label, f"{zeta:g}", *(mean_std(values, form) for values in columns)])
    header = ["method", "ζ", "mean", "worst tenth", "spread"]
    return Table(_title(grid, " on the clients' own test samples"), header, rows)


def _headline(cell: Cell) -> Headline:
    return Headline.of(TASKS[cell.config.task])


def _title(grid: list[Cell], of: str) -> str:
    """The headline of these runs; of several tasks no one's."""
    kinds = {(_headline(cell), evaluated_on(cell.config.flat())) for cell in grid}
    compared, on = kinds.pop()
    return compared.title(of, on) if not kinds else f"headline{of}"
