"""`fedman sweep` and `fedman tune`: grids of runs, the tables of their results, and the settings chosen."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedman.cli.options import ConfigOption, Device, given_keys, preset_names
from fedman.cli.output import print_message, print_table, say_how_to_resume
from fedman.errors import UserError

if TYPE_CHECKING:
    from fedman.config import Preset
    from fedman.runs.grid import Cell, Sweep
    from fedman.runs.sweep import Table


def sweep(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings, comma lists")] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="a preset, or a table of the paper; see `fedman list`", autocompletion=preset_names),
    ] = None,
    config: ConfigOption = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for the results", show_default="runs/PRESET or runs/sweep")
    ] = None,
    device: Device = "auto",
    workers: Annotated[
        int | None, typer.Option(min=1, help="processes", show_default="one a GPU; for small models one a core")
    ] = None,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="a Ray cluster that plays the runs")] = None,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="the I-th of N shares, for arrays of jobs")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="join the sweeps in these folders into --out")] = False,
    tuned: Annotated[
        Path | None, typer.Option(metavar="PATH", help="the settings that `fedman tune` chose: folders, or tune.json")
    ] = None,
    done: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="results files, or folders of them: their runs are done as well"),
    ] = None,
    left: Annotated[bool, typer.Option("--left", help="play nothing; print the runs that are left")] = False,
) -> None:
    """A grid of runs: comma lists of values, or a table of the paper. Done runs are skipped, interrupted ones go on.

    fedman sweep algorithm=fedavg,feddyn zeta=0,0.15 seed=0,1,2

    fedman sweep --preset paper-cifar100 algorithm=fedsam seed=0

    fedman sweep --preset paper-cifar100 --shard 3/16 --out runs/part-3

    fedman sweep --merge runs/part-1 runs/part-2 --out runs/all

    fedman sweep --tuned runs/tune seed=0,1,2

    fedman sweep --preset paper-cifar100 --done results --left
    """
    if merge:
        if out is None or not keys or preset or config or tuned or workers or ray or shard or done or left:
            raise UserError("--merge: name the folders to join and one to join them in: --merge DIR... --out DIR")
        from fedman.runs.merge import merge_sweeps

        typer.echo(merge_sweeps([Path(word) for word in keys], out))
        return
    from fedman.paper.presets import find_sweep
    from fedman.runs.grid import Sweep, cells

    if ray and workers:
        raise UserError("--workers: a Ray cluster has its own; leave out one of --workers and --ray")
    base: Preset | Sweep | None = find_sweep(preset)
    if tuned:
        if preset:
            raise UserError(f"tuned: {tuned} holds whole settings; leave out --preset {preset}")
        from fedman.runs.tune import chosen_sweep

        base = chosen_sweep(tuned, print_message)
    grid = cells({"keep_state": False, **given_keys(keys, config)}, base)  # the states of many runs are large
    out = out or Path("runs") / ("tuned" if tuned else base.name if isinstance(base, Sweep) else "sweep")

    from fedman.runs import results, sweep

    if shard:
        every, grid = grid, sweep.shard(grid, *shard_numbers(shard))
        if not grid:
            print_message(f"shard {shard}: nothing to do; the {len(every)} runs are in other shares")
            return
    recorded = sweep.recorded(grid, [row for place in done or () for _, rows in results.parts(place) for row in rows])
    todo = sweep.unfinished(grid, out, recorded)
    if len(todo) < len(grid):
        print_message(f"{len(grid) - len(todo)} of {len(grid)} runs are done already")
    if left:
        typer.echo("".join(f"{grid[i].name}\n" for i in todo), nl=False)
        return
    play_cells(grid, todo, out, device, ray or workers)
    tuned_keys = base.tuned if isinstance(base, Sweep) else ()
    write_tables(sweep.tables(grid, out, recorded, tuned_keys), out)


def tune(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings, comma lists")] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="a preset, or a sweep of settings; see `fedman list`", autocompletion=preset_names),
    ] = None,
    config: ConfigOption = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for the results", show_default="runs/PRESET or runs/tune")
    ] = None,
    device: Device = "auto",
    each: Annotated[str, typer.Option(metavar="KEY,...", help="choose once for every value of these keys")] = "",
    rungs: Annotated[
        str, typer.Option(metavar="ROUND,...", help="after these rounds the worse half of the settings stops")
    ] = "",
    best: Annotated[bool, typer.Option("--best", help="play nothing; print the commands of what was chosen")] = False,
) -> None:
    """Choose settings: a grid of runs, scored on training samples that are held out, never on the test set.

    fedman tune algorithm=feddyn alpha=0.001,0.01,0.1 lr=0.03,0.1

    fedman tune --each algorithm --rungs 25,50 algorithm=fedsam,fedasam rho=0.05,0.1,0.5 seed=0,1 rounds=100

    fedman tune --best --out runs/tune
    """
    from fedman.config import HELD_OUT
    from fedman.paper.presets import find_sweep
    from fedman.runs.grid import Sweep, cells

    base = find_sweep(preset)
    out = out or Path("runs") / (base.name if isinstance(base, Sweep) else "tune")
    if best:
        print_best(out)
        return
    grid = cells({"validation": HELD_OUT, **given_keys(keys, config)}, base)

    from fedman.runs.tune import known, next_runs, plan, table, write

    planned = plan(grid, _words("each", each), _rounds(rungs))
    known(planned, out)  # a folder that holds something else is refused before anything is played
    for batch in planned.batches:
        while work := next_runs(batch, planned, out):
            play_cells(work, range(len(work)), out, device)
            write(planned, out)
    write_tables([table(write(planned, out))], out)
    print_best(out)


def play_cells(
    grid: Sequence[Cell], left: Sequence[int], out: Path, device: str, workers: int | str | None = None
) -> None:
    """Play the runs of a grid that are left, with their data and their progress."""
    from fedman.cli.progress import sweep_progress, work_progress
    from fedman.data import load
    from fedman.runs import sweep

    with work_progress() as reading:
        samples = {source: load(*source, reading) for source in {grid[i].config.source for i in left}}
    sweep.refuse_other_data(grid, out, samples)
    work = {i: (grid[i].name, grid[i].config.rounds, grid[i].cost) for i in left}
    with say_how_to_resume(" the same command"), sweep_progress(work, len(grid)) as progress:
        sweep.run([grid[i] for i in left], samples, out, device, progress, print_message, workers)


def write_tables(tables: Sequence[Table], out: Path) -> None:
    """Print the tables of a sweep and write them to `table.md`."""
    from fedman.runs.atomic import write_text, writing
    from fedman.runs.text_tables import markdown

    for table in tables:
        print_table(f"{table.title}, {out}", table.header, table.rows)
    text = "\n".join(f"{markdown(table.header, table.rows)}\n{table.title}\n" for table in tables)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    write_text(out / "table.md", text)


def print_best(out: Path) -> None:
    """The commands that play what a tuning has chosen."""
    from fedman.runs.tune import NAME, choices, file_of, read

    found = read(out / NAME)
    for choice in choices(found, out):
        typer.echo(f"fedman run --config {shlex.quote(str(out / file_of(choice, found)))}")


def _rounds(text: str) -> list[int]:
    try:
        return [int(word) for word in _words("rungs", text)]
    except ValueError:
        raise UserError(f"rungs: {text!r} is not a list of rounds, as 100,250") from None


def _words(option: str, text: str) -> list[str]:
    """The words of a comma list; none of an empty one."""
    words = text.split(",") if text else []
    if not all(words):
        raise UserError(f"{option}: {text!r} has an empty word")
    return words


def shard_numbers(text: str) -> tuple[int, int]:
    """I and N of "I/N"."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UserError(f"--shard: {text!r} is not I/N with I from 1 to N, as in 3/16")
    return int(number), int(count)
