"""Run a sweep: skip finished runs, resume interrupted ones, stack what can be stacked, make a table of the results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fedman.algorithms import ALGORITHMS
from fedman.config import Config
from fedman.data import Dataset
from fedman.execution.base import is_large
from fedman.execution.device import pick_device
from fedman.models.parameters import ParameterLayout
from fedman.penalties import PENALTIES
from fedman.runs.build import initial_model, stack_key
from fedman.runs.folder import RunFolder
from fedman.runs.grid import Cell
from fedman.runs.inputs import fingerprints, refuse_other_inputs
from fedman.runs.ray_cluster import RayCluster
from fedman.runs.records import (
    Ending,
    Headline,
    Progress,
    ResultRow,
    evaluated_on,
    headline,
    is_explained,
    stopped_early,
)
from fedman.runs.results import identity, settings_identity
from fedman.runs.text_tables import mean_std
from fedman.runs.workers import Processes, Stack, play, play_all
from fedman.tasks import TASKS

CLIENTS = 90  # in one stack: more clients at once are not faster
WORTH_PROCESSES = 200  # rounds, with one gradient a step: less work than this is done before processes have started


def unfinished(grid: list[Cell], out: Path, elsewhere: Mapping[str, Ending] = {}) -> list[int]:
    """The numbers of the runs that are neither finished here nor elsewhere."""
    ended = [RunFolder(out / cell.name).finished(cell.config.flat()) for cell in grid]
    return [i for i, cell in enumerate(grid) if ended[i] is None and cell.name not in elsewhere]


def refuse_other_data(grid: Sequence[Cell], out: Path, data: Mapping[tuple[str, str | None], Dataset]) -> None:
    """Refuse to add runs to those that are here if a file of the user's own has been written anew."""
    now = {source: fingerprints(found, None) for source, found in data.items()}
    for cell in grid:
        folder = RunFolder(out / cell.name)
        if now.get(cell.config.source) and (ending := folder.ending()) is not None:
            refuse_other_inputs(folder.path, ending.get("inputs", {}), now[cell.config.source])


def recorded(grid: list[Cell], rows: Sequence[ResultRow]) -> dict[str, Ending]:
    """The runs of a grid that are among these rows, by name: with precision=auto in whichever precision. Rows that no
    commit explains do not count."""
    known: dict[str, ResultRow] = {}
    for row in filter(is_explained, rows):
        known |= {settings_identity(row["config"] | {"precision": "auto"}): row, identity(row): row}
    found = {cell.name: known.get(settings_identity(cell.config.flat())) for cell in grid}
    return {name: row for name, row in found.items() if row is not None}


def run(
    cells: Sequence[Cell],
    data: Mapping[tuple[str, str | None], Dataset],
    out: Path,
    device: str,
    progress: Sequence[Progress],
    warn: Callable[[str], object],
    workers: int | str | None = 1,
) -> None:
    """Run these cells, each from its last checkpoint, on data sets by `Config.source`.

    `workers` is a number of processes, None for as many as the machine has use for, or the address of a Ray cluster.
    """
    if not cells:
        return
    chosen, device = device, pick_device(device)
    configs = [cell.config for cell in cells]
    stacked = _stacked(configs, data, device)
    if workers is None:  # a GPU that was named is to be the only one
        workers = 1 if ":" in chosen else _useful_workers(cells, device, all(stacked))
    numbers = groups(configs, stacked, workers if isinstance(workers, int) else 1)
    say = {cell.name: each for cell, each in zip(cells, progress, strict=True)}
    stacks = [Stack(tuple(cells[i] for i in group), out) for group in numbers]
    if isinstance(workers, str):
        play_all(stacks, RayCluster(workers, out, device), say, warn)
    elif min(workers, len(stacks)) > 1:
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        play_all(stacks, Processes(min(workers, len(stacks)), device, gpus), say, warn)
    else:
        for stack in stacks:
            for message in play(stack, device, data, say, warn):
                warn(message)


def _stacked(configs: Sequence[Config], data: Mapping[tuple[str, str | None], Dataset], device: str) -> list[bool]:
    """Whether each run may share a stack: on a GPU every one, on a CPU those with a small model."""
    if device == "cuda":
        return [True] * len(configs)
    found: dict[object, bool] = {}
    for config in configs:
        if (kind := stack_key(config)) not in found:
            model = initial_model(config.model, data[config.source], config.make_task(), config.seed)
            found[kind] = not is_large(ParameterLayout.of(model).size)
    return [found[stack_key(config)] for config in configs]


def _useful_workers(cells: Sequence[Cell], device: str, small: bool) -> int:
    """One process a GPU. On a CPU one a core for small models, which do not keep several cores busy, and where the
    work is more than starting processes."""
    if device == "cuda":
        return torch.cuda.device_count()
    return torch.get_num_threads() if small and sum(cell.cost for cell in cells) >= WORTH_PROCESSES else 1


def groups(configs: Sequence[Config], stacked: Sequence[bool], workers: int = 1) -> list[list[int]]:
    """Which runs to stack: similar ones, in groups of about `CLIENTS` clients, and at least as many groups as workers
    where there are runs enough. A run that is not `stacked` stays alone."""
    kinds: dict[object, list[int]] = {}
    for i, config in enumerate(configs):
        kinds.setdefault(stack_key(config) if stacked[i] else i, []).append(i)
    made = []
    for members in kinds.values():
        config = configs[members[0]]
        count = max(1, round(len(members) * config.clients * config.participation / CLIENTS))
        made += _parts(members, count)
    while len(made) < workers and len(largest := max(made, key=len)) > 1:
        made.remove(largest)
        made += _parts(largest, 2)
    return made


def _parts(members: list[int], count: int) -> list[list[int]]:
    """A list in `count` parts of nearly the same length."""
    return [members[i * len(members) // count : (i + 1) * len(members) // count] for i in range(count)]


def shard(cells: Sequence[Cell], number: int, count: int) -> list[Cell]:
    """The cells of one of `count` shares, numbered from 1, of nearly the same cost: the same cells on every machine.

    Runs that can be stacked stay together as far as that goes.
    """
    kinds: dict[object, list[Cell]] = {}
    for cell in cells:
        kinds.setdefault(stack_key(cell.config), []).append(cell)
    row = [cell for kind in kinds.values() for cell in kind]
    whole, before, mine = sum(cell.cost for cell in row), 0.0, []
    for cell in row:
        middle = before + cell.cost / 2
        if int(middle / whole * count) + 1 == number:
            mine.append(cell)
        before += cell.cost
    return mine


@dataclass(frozen=True)
class Table:
    """A table of a sweep's runs, its rows as text."""

    title: str
    header: list[str]
    rows: list[list[str]]


def tables(
    grid: list[Cell], out: Path, elsewhere: Mapping[str, Ending] = {}, tuned: Collection[str] = ()
) -> list[Table]:
    """The headline of `all`, and where clients have test samples of their own, what it is there.

    Runs that are not in the folder may have ended elsewhere. Settings that differ in `tuned` keys are one method, if
    there is one of them for each ζ.
    """
    methods: dict[str, list[tuple[Cell, Ending]]] = {}
    names = {cell.config.algorithm for cell in grid}
    titles = {name: ALGORITHMS[name].title for name in names}

    def label(cell: Cell, apart: Collection[str]) -> str:
        title = titles[cell.config.algorithm]
        unique = list(titles.values()).count(title) == 1
        rest = {k: v for k, v in cell.varied.items() if k not in ("seed", "zeta", "algorithm", *apart)}
        return " ".join([title if unique else cell.config.algorithm, *(f"{k}={v}" for k, v in rest.items())])

    places = {(label(cell, tuned), cell.config.zeta, cell.config.seed) for cell in grid}
    apart = tuned if len(places) == len(grid) else ()
    for cell in grid:
        if (ending := RunFolder(out / cell.name).ending() or elsewhere.get(cell.name)) is not None:
            methods.setdefault(label(cell, apart), []).append((cell, ending))
    made = [_headlines(grid, methods), _clients(grid, methods)]
    return [each for each in made if each.rows]


def _headlines(grid: list[Cell], methods: Mapping[str, list[tuple[Cell, Ending]]]) -> Table:
    """Mean ± standard deviation over seeds, plain beside each penalty; a gain is positive where it is better."""
    penalties = {PENALTIES[cell.config.penalty].title for cell in grid}
    added = penalties.pop() if len(penalties) == 1 else "penalty"
    zetas = sorted({cell.config.zeta for ended in methods.values() for cell, _ in ended})
    header = ["method", *("plain" if z == 0 else f"+{added} ζ={z:g}" for z in zetas)]
    gain = 0.0 in zetas and len(zetas) == 2
    common = True  # whether every gain is over all seeds
    rows = []
    for label, ended in methods.items():
        compared = _headline(ended[0][0])
        values = [{cell.config.seed: headline(end) for cell, end in ended if cell.config.zeta == z} for z in zetas]
        means = [statistics.fmean(by_seed.values() or [math.nan]) for by_seed in values]
        row = [label, *(mean_std([*v.values()], compared.form(m)) for v, m in zip(values, means, strict=True))]
        if gain:
            gained, alike = _gained(compared, *values)
            common &= alike
            row.append(f"{gained:+{compared.form(*means)}}" if math.isfinite(gained) else "–")
        rows.append(row)
    if gain:
        header.append("gain" if common else "gain over common seeds")
    stopped = stopped_early(ending for ended in methods.values() for _, ending in ended)
    title = "; ".join(filter(None, (_title(grid, " of the mean of all clients"), stopped)))
    return Table(title, header, rows)


def _gained(compared: Headline, plain: Mapping[int, float], added: Mapping[int, float]) -> tuple[float, bool]:
    """The gain over the seeds that both have, which in a shard need not be all; nan where a run diverged. And whether
    both have the same."""
    seeds = plain.keys() & added.keys()
    if not seeds or not all(map(math.isfinite, (*plain.values(), *added.values()))):
        return math.nan, True
    before, after = (statistics.fmean(values[seed] for seed in sorted(seeds)) for values in (plain, added))
    return compared.gain(before, after), plain.keys() == added.keys()


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
