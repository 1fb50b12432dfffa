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
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fedman.algorithms import ALGORITHMS
from fedman.cli import data, flower
from fedman.cli.flatness import flatness
from fedman.cli.listing import print_listing
from fedman.cli.options import (
    ConfigOption,
    Device,
    Keys,
    KeysCommand,
    Out,
    PresetOption,
    Resume,
    run_folder,
    run_keys,
)
from fedman.cli.output import print_message, print_result, say_how_to_resume
from fedman.cli.sweeps import sweep, tune
from fedman.errors import Diverged, Interrupted, TooFew, UserError, describe

*TITLES, LAST = (algorithm.title for algorithm in ALGORITHMS.built_in.values())
app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help=f"Federated learning that lands in flatter minima: {', '.join(TITLES)} and {LAST}, with and without "
    "minimising layerwise activation norms (MAN).",
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


app.command(cls=KeysCommand)(sweep)
app.command(cls=KeysCommand)(tune)


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


app.command(name="list")(print_listing)
app.add_typer(data.app, name="data")
app.add_typer(flower.app, name="flower")


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
