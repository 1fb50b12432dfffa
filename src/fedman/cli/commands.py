"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fedman.cli.flower import app as flower_app
from fedman.cli.options import (
    ConfigOption,
    Device,
    Keys,
    Out,
    PresetOption,
    Resume,
    given_keys,
    run_folder,
    run_name,
    say,
    tell,
)
from fedman.errors import Diverged, Interrupted, TooFew, UserError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Federated learning that lands in flat minima: FedAvg, FedSAM, FedASAM, FedDyn, FedDC, FedSpeed, FedProx "
    "and SCAFFOLD, with and without minimising layerwise activation norms (MAN).",
)
data_app = typer.Typer(no_args_is_help=True, help="Get data sets; show how they are split over clients.")
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")


@app.command()
def run(
    keys: Keys = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    out: Out = None,
    resume: Resume = False,
    device: Device = "auto",
) -> None:
    """One run.

    fedman run --preset cifar100-dir0.3 algorithm=feddc zeta=0.15
    """
    from fedman.config import resolve

    settings = resolve(given_keys(keys, preset, config, out, resume), preset)
    out = run_folder(out or Path("runs") / run_name(settings), resume)

    from fedman.cli.progress import data_progress, run_progress
    from fedman.data import load
    from fedman.runs import experiment

    with data_progress() as reading:
        data = load(settings.dataset, settings.data_dir, reading)
    command = f": fedman run --out {shlex.quote(str(out))} --resume"
    title = f"{settings.method} · {settings.dataset} {settings.partition}"
    with going_on_with(command), run_progress(title, settings.rounds) as advance:
        result = experiment.run(settings, data=data, out=out, resume=resume, device=device, progress=advance, warn=say)
    tell(settings, result.summary, out)


@app.command()
def sweep(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings, comma lists")] = None,
    preset: Annotated[str | None, typer.Option(help="a preset, or a table of the paper; see `fedman list`")] = None,
    config: ConfigOption = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for the results", show_default="runs/PRESET or runs/sweep")
    ] = None,
    device: Device = "auto",
    merge: Annotated[bool, typer.Option("--merge", help="join the sweeps in these folders into --out")] = False,
) -> None:
    """A grid of runs: comma lists of values, or a table of the paper. Done runs are skipped, interrupted ones go on.

    fedman sweep algorithm=fedavg,feddyn zeta=0,0.15 seed=0,1,2

    fedman sweep --preset paper-cifar100 algorithm=fedsam seed=0

    fedman sweep --merge runs/a runs/b --out runs/all
    """
    from fedman.config import overrides, read_toml

    if merge:
        if out is None or not keys or preset or config:
            raise UserError("--merge: name the folders to join and one to join them in: --merge DIR... --out DIR")
        from fedman.runs.merge import merge_sweeps

        typer.echo(merge_sweeps([Path(word) for word in keys], out))
        return
    given: dict[str, Any] = {**(read_toml(config) if config else {}), **overrides(keys or [])}
    from fedman.runs import sweep as grids

    with going_on_with(" the same command"):
        grids.command(given, preset, out, device, say)


@app.command()
def results(
    sources: Annotated[list[Path], typer.Argument(metavar="DIR...", help="folders of runs, or results files")],
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="the file to write, or to add to")],
    replace: Annotated[bool, typer.Option("--replace", help="a run that differs takes the place of the old")] = False,
    flatness: Annotated[
        Path | None, typer.Option(metavar="DIR", help="also keep what was measured of them here")
    ] = None,
) -> None:
    """Finished runs as one small file: a JSON line each, with summary and accuracy curve.

    fedman results runs/paper-cifar100 --out results/cifar100.jsonl
    """
    from fedman.paper.flatness.flatness_json import copy_compact
    from fedman.runs.results import command

    typer.echo(command(sources, out, replace))
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


@app.command()
def flatness(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="[RUN]...", help="folders of finished runs")] = None,
    top: Annotated[int | None, typer.Option(metavar="K", help="the K largest eigenvalues of the Hessian")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="its trace with a standard error")] = False,
    density: Annotated[bool, typer.Option("--density", help="the density of its eigenvalues")] = False,
    layers: Annotated[bool, typer.Option("--layers", help="top eigenvalue and trace of each layer's block")] = False,
    clients: Annotated[bool, typer.Option("--clients", help="top eigenvalue of each client's loss")] = False,
    landscape: Annotated[bool, typer.Option("--landscape", help="the loss around the model")] = False,
    directions: Annotated[str, typer.Option(help="of the landscape: random, or top (eigenvectors)")] = "random",
    axes: Annotated[int, typer.Option(help="of the landscape: 1 or 2")] = 2,
    points: Annotated[int, typer.Option(help="of the landscape along an axis")] = 41,
    span: Annotated[float, typer.Option(help="of the landscape: from -SPAN to SPAN")] = 1.0,
    ends: Annotated[str, typer.Option(help="of the spectrum for --top: top, or both (K of each)")] = "top",
    tol: Annotated[float, typer.Option(help="residual of an eigenvalue, relative to the largest")] = 1e-4,
    rtol: Annotated[float, typer.Option(help="standard error of a trace, relative")] = 0.01,
    starts: Annotated[int, typer.Option(help="of the density's Lanczos runs")] = 5,
    steps: Annotated[int, typer.Option(help="of each of them")] = 100,
    model: Annotated[str, typer.Option(help="all, sel, cloud, or several with commas")] = "all",
    samples: Annotated[int | None, typer.Option(help="training samples, drawn at random", show_default="all")] = None,
    batch_size: Annotated[int | None, typer.Option(help="samples at once: bounds the memory")] = None,
    keep_graphs: Annotated[
        bool | None,
        typer.Option(
            "--keep-graphs/--drop-graphs", help="faster products for memory", show_default="on CUDA, where they fit"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="of random vectors and directions")] = 0,
    precision: Annotated[str, typer.Option(help="fp32, fp64, or tf32 on CUDA")] = "fp32",
    device: Device = "auto",
    data_dir: Annotated[Path | None, typer.Option(help="where the data set lies", show_default="as in the run")] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for the pictures", show_default="the run's, or that of all")
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="only draw what has been measured")] = False,
    theory: Annotated[bool, typer.Option("--theory", help="check the paper's bounds on a small federation")] = False,
) -> None:
    """How flat the training loss is around finished runs; top eigenvalue and trace unless told.

    fedman flatness runs/fedavg runs/fedavg-man --top 200 --density --landscape
    """
    from fedman.cli.progress import print_table, work_progress
    from fedman.paper.flatness import command

    models = command.chosen_models(model)
    screen = command.Screen(typer.echo, print_table, work_progress)
    if theory:
        return command.theory(out, seed, screen)
    if plot:
        return command.plot(runs or [], models, out, screen)
    if top is not None and top < 1:
        raise UserError(f"top: {top}; at least 1 eigenvalue is needed")
    nothing = not (top or trace or density or layers or clients or landscape)
    request = command.Request(
        top=top or int(nothing), ends=ends, trace=trace or nothing, density=density, layers=layers, clients=clients,
        landscape=directions if landscape else "", axes=axes, points=points, span=span, tol=tol, rtol=rtol,
        starts=starts, steps=steps, seed=seed, precision=precision, batch_size=batch_size, keep_graphs=keep_graphs,
    )  # fmt: skip
    command.measure(
        runs or [], request, models=models, samples=samples, device=device, data_dir=data_dir, out=out, screen=screen
    )


@app.command(name="list")
def list_() -> None:
    """Algorithms with their hyper-parameters, data sets, models, presets, and all keys."""
    from fedman.algorithms import ALGORITHMS, hyperparameters
    from fedman.config import MODELS, Config
    from fedman.data import SPECS
    from fedman.paper.presets import PRESETS, SWEEPS

    typer.echo("algorithms")
    for name, kind in ALGORITHMS.items():
        hyper = " ".join(f"{k}={v}".lower() for k, v in hyperparameters(name).items())
        typer.echo(f"  {name:14} {kind.title:9} {hyper}".rstrip())
    typer.echo("data sets")
    for name, spec in SPECS.items():
        shape = "x".join(map(str, spec.shape))
        typer.echo(f"  {name:14} {spec.classes} classes of {shape}, model {spec.model}")
    typer.echo("  npz:PATH       your own arrays: x_train, y_train, x_test, y_test, or x and y")
    typer.echo(f"models\n  {' '.join(MODELS)}")
    typer.echo("presets (the paper's settings, with its ζ; zeta=0 gives the plain algorithm)")
    for name, values in PRESETS.items():
        typer.echo(f"  {name:21} zeta={values['zeta']} rounds={values['rounds']} clients={values['clients']}")
    typer.echo("sweeps (the paper's tables and figures; keys choose a part)")
    for name, grids in SWEEPS.items():
        axes = " ".join(f"{key}={','.join(options)}" for key, options in grids[0].axes.items())
        typer.echo(f"  {name:21} {axes}{f' and {len(grids) - 1} more grids' if len(grids) > 1 else ''}")
    typer.echo("keys")
    for name, field in Config.model_fields.items():
        default = "" if field.default in (None, "") else f" [{field.default}]".lower()
        typer.echo(f"  {name:18} {field.description}{default}")


@data_app.command()
def get(
    name: Annotated[str, typer.Argument(help="data set to download")],
    data_dir: Annotated[
        Path | None, typer.Option(help="where to", show_default="$FEDMAN_DATA or ~/.cache/fedman")
    ] = None,
    url: Annotated[str | None, typer.Option(help="a mirror; the checksum stays the official one")] = None,
) -> None:
    """Download the official archive, with resume and checksum."""
    from fedman.cli.progress import data_progress
    from fedman.data import download

    with data_progress() as advance:
        paths = download.get(name, data_dir, url=url, progress=advance)
    for path in paths:
        typer.echo(f"written to {path}")
    if not paths:
        typer.echo(f"{name} is part of the package; there is nothing to download")


@data_app.command()
def show(
    keys: Keys = None,
    preset: PresetOption = None,
    plot: Annotated[Path | None, typer.Option(help="draw class x client to a .png or .svg")] = None,
) -> None:
    """How a data set is split over the clients.

    fedman data show --preset cifar100-dir0.3 --plot partition.png
    """
    from fedman.config import overrides, resolve
    from fedman.data import load, partition

    settings = resolve(overrides(keys or []), preset)
    data = load(settings.dataset, settings.data_dir)
    parts = partition.for_config(settings, data)
    if plot is not None:
        partition.plot(data.y_train, parts, data.classes, plot)
    facts = partition.heterogeneity(data.y_train, parts, data.classes)
    typer.echo(f"{settings.dataset}, {settings.partition}: " + ", ".join(f"{k} {v:.4g}" for k, v in facts.items()))
    if plot is not None:
        typer.echo(f"written to {plot}")


@contextmanager
def going_on_with(command: str) -> Iterator[None]:
    """An interruption says how to go on."""
    try:
        yield
    except Interrupted as error:
        raise Interrupted(error.signum, f"{error}; go on with{command}") from None


def stop(message: str, code: int) -> NoReturn:
    """Say why and leave."""
    say(message)
    raise SystemExit(code)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; what a user can cause ends in one message and an exit code, never in a traceback.

    2: bad input. 3: the run diverged. 4: too few clients. 130, 143: interrupted, after a checkpoint.
    """
    command: Callable[..., Any] = typer.main.get_command(app)
    try:
        command(arguments if arguments is not None else sys.argv[1:], standalone_mode=True)
    except UserError as error:
        stop(f"error: {error}", 2)
    except Diverged as error:
        stop(f"diverged: {error}; a smaller lr or zeta may help", 3)
    except TooFew as error:
        stop(f"too few clients: {error}", 4)
    except Interrupted as error:
        stop(str(error), 128 + error.signum)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
            stop("error: not enough memory; fewer clients, a smaller model or a smaller batch_size need less", 2)
        raise
