"""The commands of `fedman`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import atexit
import gc
import io
import os
import shlex
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from fedman.algorithms import ALGORITHMS, hyperparameters
from fedman.cli import data, flower
from fedman.cli.flatness import flatness
from fedman.cli.options import (
    ConfigOption,
    Device,
    Keys,
    KeysCommand,
    Out,
    PresetOption,
    Resume,
    given_keys,
    preset_names,
    run_folder,
    run_keys,
)
from fedman.cli.output import print_message, print_result, print_table
from fedman.errors import Diverged, Interrupted, TooFew, UserError, describe

if TYPE_CHECKING:
    from fedman.config import Preset
    from fedman.runs.grid import Cell, Sweep
    from fedman.runs.sweep import Table

*TITLES, LAST = (algorithm.title for algorithm in ALGORITHMS.built_in.values())
app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help=f"Federated learning that lands in flat minima: {', '.join(TITLES)} and {LAST}, with and without minimising "
    "layerwise activation norms (MAN).",
)
for group in (app, data.app, flower.app):
    group.suggest_commands = False  # click has a suggestion of its own; typer would add it again


def print_version(wanted: bool) -> None:
    """`fedman --version`, the line that a report of a mistake needs."""
    if wanted:
        from fedman.runs.version import version

        typer.echo(f"fedman {version()}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


def load_torch(device: str) -> None:
    """Import what a run needs and open the GPU: seconds in which data can be read."""
    from fedman.execution.device import open_device
    from fedman.runs import experiment  # noqa: F401

    open_device(device)


@app.command(cls=KeysCommand)
def run(
    keys: Keys = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    out: Out = None,
    resume: Resume = False,
    device: Device = "auto",
) -> None:
    """One run. `fedman list` explains its keys.

    fedman run --preset cifar100-dir0.3 algorithm=feddc zeta=0.15
    """
    from fedman.config import CUSTOM, resolve
    from fedman.paper.presets import find_preset
    from fedman.runs.folder import RunFolder

    settings = resolve(run_keys(keys, preset, config, out, resume), find_preset(preset))
    out = run_folder(out, settings)
    RunFolder(out).refuse_unfit(resume)  # before data are read
    if resume and CUSTOM in (settings.dataset, settings.model, settings.partition.partition("-")[0]):
        raise UserError(f"{out}: a run of your own arrays, module or clients; resume it in Python, with resume=True")

    from fedman.cli.progress import run_progress, work_progress
    from fedman.data import load

    meanwhile = threading.Thread(target=load_torch, args=[device])
    meanwhile.start()
    try:
        with work_progress() as reading:
            samples = load(*settings.source, reading)
    finally:
        meanwhile.join()  # torch cannot be imported while Python ends

    from fedman.runs import experiment

    with (
        say_how_to_resume(f": fedman run --out {shlex.quote(str(out))} --resume"),
        run_progress(settings) as advance,
    ):
        result = experiment.run(
            settings, data=samples, out=out, resume=resume, device=device, progress=advance, warn=print_message
        )
    print_result(settings, result.summary, out)


@app.command(cls=KeysCommand)
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


@app.command(cls=KeysCommand)
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


@app.command()
def results(
    sources: Annotated[list[Path], typer.Argument(metavar="DIR...", help="folders of runs, or results files")],
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="the file to write, or to add to")],
    replace: Annotated[bool, typer.Option("--replace", help="a run that differs takes the place of the old")] = False,
    committed: Annotated[
        bool, typer.Option("--committed", help="add no run whose code is in no commit and no release")
    ] = False,
    flatness: Annotated[
        Path | None, typer.Option(metavar="DIR", help="also keep what was measured of them here")
    ] = None,
) -> None:
    """Finished runs as one small file: a JSON line each, with summary and curve.

    fedman results runs/paper-cifar100 --out results/cifar100.jsonl
    """
    from fedman.paper.flatness.flatness_json import copy_compact
    from fedman.runs.results import command

    typer.echo(command(sources, out, replace, committed))
    if flatness is not None:
        typer.echo(copy_compact(sources, flatness))


@app.command()
def report(
    place: Annotated[Path, typer.Argument(metavar="DIR", help="folder with results files or runs, or one of either")],
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="the page to write")] = Path("report.html"),
) -> None:
    """One page of tables and pictures, beside the paper's figures; it needs no network.

    fedman report results --out report.html
    """
    from fedman.paper.report import command

    typer.echo(command(place, out))


app.command()(flatness)


@app.command()
def verify(
    places: Annotated[list[Path], typer.Argument(metavar="DIR...", help="folders of runs, or results files")],
) -> None:
    """Compare all files of runs, results and measurements with their checksums; exits with 2 if any is damaged.

    fedman verify runs/paper-cifar100 results
    """
    from fedman.paper.verify import verify

    found = verify(places)
    typer.echo(found.text)
    if found.damaged:
        raise UserError("\n".join([f"{len(found.damaged)} damaged", *found.damaged]))


@app.command(name="list")
def print_listing() -> None:
    """Algorithms and all other parts with their hyper-parameters, data sets, models, presets, all keys."""
    from fedman.config import KEYS, PARTS, resolve
    from fedman.data import SCHEMES, SPECS
    from fedman.models import MODELS
    from fedman.paper.presets import PRESETS, SWEEPS

    for registry in reversed(PARTS.values()):
        typer.echo(f"{registry.group.removeprefix('fedman.')} (or module:Name, your own)")
        width = max(len(part.title) for part in registry.values())
        for name, part in registry.items():
            hyper = " ".join(f"{k}={v}".lower() for k, v in hyperparameters(part).items() if k not in KEYS)
            typer.echo(f"  {name:14} {part.title:{width}} {hyper}".rstrip())
    typer.echo("data sets")
    for name, spec in SPECS.items():
        typer.echo(f"  {name:14} {spec.content}, model {spec.model}")
    for scheme in SCHEMES.values():
        typer.echo(f"  {scheme.form:14} {scheme.title}")
    typer.echo(f"models (or module:builder, your own)\n  {' '.join(MODELS)}")
    typer.echo("presets (the paper's settings, with its ζ; zeta=0 gives the plain algorithm)")
    for name, preset in PRESETS.items():
        config = resolve({}, preset)
        typer.echo(f"  {name:21} zeta={config.zeta} rounds={config.rounds} clients={config.clients}")
    typer.echo("sweeps (tables and figures of the paper and of the field; keys choose a part)")
    for name, sweep in SWEEPS.items():
        axes = " ".join(f"{key}={','.join(options)}" for key, options in sweep.grids[0].axes.items())
        more = f" and {len(sweep.grids) - 1} more grids" if len(sweep.grids) > 1 else ""
        typer.echo(f"  {name:21} {axes}{more}")
    typer.echo("keys")
    for name, field in KEYS.items():
        default = "" if field.default in (None, "") else f" [{field.default}]".lower()
        typer.echo(f"  {name:18} {field.description}{default}")
    owners: dict[tuple[str, str], list[str]] = {}
    for part in (part for registry in PARTS.values() for part in registry.values()):
        for own in (own for own in fields(part) if own.name not in KEYS):
            owners.setdefault((own.name, own.metadata.get("description", "")), []).append(part.title)
    for (name, description), titles in owners.items():
        typer.echo(f"  {name:18} {description} ({', '.join(titles)})")


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


app.add_typer(data.app, name="data")
app.add_typer(flower.app, name="flower")


def shard_numbers(text: str) -> tuple[int, int]:
    """I and N of "I/N"."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UserError(f"--shard: {text!r} is not I/N with I from 1 to N, as in 3/16")
    return int(number), int(count)


@contextmanager
def say_how_to_resume(command: str) -> Iterator[None]:
    """Add the command that continues a run to the message of an interruption."""
    try:
        yield
    except Interrupted as error:
        raise Interrupted(error.signum, f"{error}; go on with{command}") from None


def main(arguments: list[str] | None = None) -> None:
    """Run a command; what a user can cause ends in one message and an exit code, never in a traceback.

    2: bad input. 3: the run diverged. 4: too few clients. 129, 130, 143: interrupted, after a checkpoint.
    1: a mistake in fedman itself, with a line that says what to report; FEDMAN_TRACEBACK=1 shows the traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")  # a terminal that has no ζ, a path that is no Unicode
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # else it reads the files of all installed packages
    atexit.register(gc.freeze)  # torch's objects are not searched for cycles when the process ends: 0.4 s
    try:
        app(arguments, prog_name="fedman")
    except UserError as error:
        _exit(f"error: {error}", 2)
    except Diverged as error:
        _exit(f"diverged: {error}; a smaller lr or zeta may help", 3)
    except TooFew as error:
        _exit(f"too few clients: {error}", 4)
    except Interrupted as error:
        _exit(str(error), 128 + error.signum)
    except OSError as error:
        _exit(f"error: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", 2)
    except Exception as error:
        if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
            _exit("error: not enough memory; fewer clients, a smaller model or a smaller batch_size need less", 2)
        if os.environ.get("FEDMAN_TRACEBACK"):
            raise
        _exit(_report(error), 1)


NO_MEMORY = ("allocate memory", "out of memory")


def _report(error: Exception) -> str:
    """What to report of an error that nobody expected: its kind, its text and the line of ours it came from."""
    from fedman.runs.version import version

    frames = traceback.extract_tb(error.__traceback__)
    ours = next((frame for frame in reversed(frames) if "fedman" in Path(frame.filename).parts), frames[-1])
    where = f"{Path(ours.filename).name}:{ours.lineno}"
    how = "please report this line and the command; FEDMAN_TRACEBACK=1 shows where it happened"
    return f"internal error in fedman {version()}, {where}: {describe(error, 300)}; {how}"


def _exit(message: str, code: int) -> NoReturn:
    print_message(message)
    raise SystemExit(code)


if __name__ == "__main__":  # python -m fedman.cli.commands, which would otherwise do nothing and exit with 0
    main()
