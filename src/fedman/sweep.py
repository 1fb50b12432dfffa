"""A grid of runs: comma lists of values, done cells skipped, half-done ones resumed, a table at the end."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedman import experiment
from fedman.algorithms import ALGORITHMS, hyperparameters
from fedman.assembly import stackable
from fedman.config import HYPERPARAMETERS, Config, resolve
from fedman.data import Dataset
from fedman.errors import Diverged, UserError
from fedman.records import finished
from fedman.runtime import pick_device

MAX_CELLS = 10_000
CLIENTS = 90  # in one chunk: more no longer make a client cheaper


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


def cells(values: Mapping[str, Any], preset: str | None) -> list[Cell]:
    """The grid over all keys that hold a comma list.

    A hyper-parameter is given to the algorithms that have it and must belong to one of them at least.
    """
    lists = {key: value.split(",") if isinstance(value, str) else _listed(value) for key, value in values.items()}
    twice = [key for key, options in lists.items() if len(set(map(str, options))) < len(options)]
    if twice:
        raise UserError(f"{twice[0]}: a value stands twice in {values[twice[0]]!r}")
    if math.prod(map(len, lists.values())) > MAX_CELLS:
        many = " x ".join(f"{len(options)} {key}" for key, options in lists.items() if len(options) > 1)
        raise UserError(f"sweep: {many} are more than the {MAX_CELLS} runs allowed")
    algorithms = [a for a in lists.get("algorithm", ["fedavg"]) if a in ALGORITHMS]
    for key in lists.keys() & set(HYPERPARAMETERS):
        if algorithms and not any(key in hyperparameters(a) for a in algorithms):
            raise UserError(f"{key}: none of {', '.join(algorithms)} has this hyper-parameter")
    grid: dict[str, Cell] = {}
    for combination in itertools.product(*lists.values()):
        chosen = dict(zip(lists, combination, strict=True))
        own = (
            hyperparameters(chosen.get("algorithm", "fedavg"))
            if chosen.get("algorithm", "fedavg") in ALGORITHMS
            else HYPERPARAMETERS
        )
        chosen = {key: value for key, value in chosen.items() if key not in HYPERPARAMETERS or key in own}
        cell = Cell({key: v for key, v in chosen.items() if len(lists[key]) > 1}, resolve(chosen, preset))
        grid.setdefault(cell.name, cell)
    return list(grid.values())


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


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
        cells = [left[i] for i in group]
        results = experiment.run_stacked(
            [grid[i].config for i in cells],
            data[grid[cells[0]].config.source],
            [out / grid[i].name for i in cells],
            resume=True,
            device=device,
            progress=[on_cell(i, grid[i]) for i in cells],
            warn=warn,
        )
        for i, result in zip(cells, results, strict=True):
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
    seeds = 0
    for row in rows:
        cell: Cell = row["cell"]
        rest = {k: v for k, v in cell.varied.items() if k not in ("seed", "zeta", "algorithm")}
        label = (ALGORITHMS[cell.config.algorithm].title, *(f"{k}={v}" for k, v in rest.items()))
        accuracy = math.nan if "diverged" in row else row["accuracy"]["all"]
        values = groups.setdefault(label, {}).setdefault(cell.config.zeta, [])
        values.append(accuracy)
        seeds = max(seeds, len(values))
    zetas = sorted({zeta for group in groups.values() for zeta in group})
    header = ["method", *("plain" if z == 0 else f"+MAN ζ={z:g}" for z in zetas)]
    gain = 0.0 in zetas and len(zetas) == 2
    lines = []
    for label, group in groups.items():
        line = [" ".join(label), *(_mean_std(group.get(z, [])) for z in zetas)]
        if gain:
            plain, man = (statistics.fmean(group.get(z) or [math.nan]) for z in zetas)
            line.append(f"{man - plain:+.2f}")
        lines.append(line)
    return [*header, "gain"] if gain else header, lines


def _mean_std(values: list[float]) -> str:
    if not values:
        return "–"
    if any(map(math.isnan, values)):
        return "diverged"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """A table as Markdown."""
    rule = ["---"] * len(header)
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *lines])
