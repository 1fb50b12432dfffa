"""`fedman flower ...`. Flower itself is imported by the command that needs it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

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
from fedman.errors import UserError

app = typer.Typer(no_args_is_help=True, help="The same algorithms on Flower, on many machines or simulated.")


@app.command()
def simulate(
    keys: Keys = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    out: Out = None,
    resume: Resume = False,
    device: Device = "auto",
    cpus: Annotated[float, typer.Option(help="CPUs a client at work takes", min=0.01)] = 1.0,
    gpus: Annotated[float, typer.Option(help="share of a GPU a client at work takes", min=0)] = 0.0,
) -> None:
    """One run in Flower's simulation engine, on this machine or the Ray cluster of $RAY_ADDRESS.

    fedman flower simulate --preset digits algorithm=feddc rounds=10
    """
    need_flower()
    from fedman.config import resolve
    from fedman.flower.service import FILE, split

    values, service = split(given_keys(keys, preset, config, out, resume, (FILE,)))
    settings = resolve(values, preset)
    out = run_folder(out or Path("runs") / f"flower-{run_name(settings)}", resume)

    from fedman.cli.progress import run_progress
    from fedman.flower.simulation import simulate as run_simulated

    with run_progress(f"{settings.method} · {settings.dataset} {settings.partition}", settings.rounds) as advance:
        result = run_simulated(
            settings, service, out=out, resume=resume, device=device, cpus=cpus, gpus=gpus, progress=advance, warn=say
        )
    tell(settings, result.summary, out)


@app.command()
def new(folder: Annotated[Path, typer.Argument(help="a folder that does not exist yet")]) -> None:
    """Write the Flower app that `flwr run` starts in a deployment."""
    need_flower()
    from fedman.flower.app import new_project

    new_project(folder)
    typer.echo(f"written to {folder}; start it with: flwr run {folder} SUPERLINK -c 'settings=\"KEY=VALUE ...\"'")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def superexec(context: typer.Context) -> None:
    """`flower-superexec`, with its own options, whose client processes start warm."""
    need_flower()
    from fedman.flower.executor import main as run_superexec

    run_superexec(context.args)


def need_flower() -> None:
    """Say how to get Flower where it is missing."""
    if find_spec("flwr") is None or find_spec("ray") is None:
        raise UserError("flower: not installed; pip install 'fedman[flower]'")
