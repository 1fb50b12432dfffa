"""`fedman flower ...`: runs on Flower. Flower itself is imported by the command that needs it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

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
from fedman.cli.output import print_message, print_result
from fedman.errors import UserError

app = typer.Typer(no_args_is_help=True, help="The same algorithms on Flower, on many machines or simulated.")


@app.command(cls=KeysCommand)
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
    require_flower()
    from fedman.config import resolve
    from fedman.flower.server_options import OPTIONS_FILE, split_options
    from fedman.paper.presets import find_preset

    values, options = split_options(run_keys(keys, preset, config, out, resume, (OPTIONS_FILE,)))
    settings = resolve(values, find_preset(preset))
    out = run_folder(out, settings, "flower-")

    from fedman.cli.progress import run_progress
    from fedman.flower.simulation import simulate as run_simulated

    with run_progress(settings) as advance:
        result = run_simulated(
            settings,
            options,
            out=out,
            resume=resume,
            device=device,
            cpus=cpus,
            gpus=gpus,
            progress=advance,
            warn=print_message,
        )
    print_result(settings, result.summary, out)


@app.command()
def new(folder: Annotated[Path, typer.Argument(help="a folder that does not exist yet")]) -> None:
    """Write the Flower app that `flwr run` starts in a deployment."""
    require_flower()
    from fedman.flower.app import new_project

    new_project(folder)
    typer.echo(f"written to {folder}; start it with: flwr run {folder} SUPERLINK -c 'settings=\"KEY=VALUE ...\"'")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def superexec(context: typer.Context) -> None:
    """`flower-superexec`, with its own options, whose client processes start warm."""
    require_flower()
    from fedman.flower.superexec import main as run_superexec

    run_superexec(context.args)


def require_flower() -> None:
    """Refuse to go on if Flower is not installed, and say how to install it."""
    if find_spec("flwr") is None or find_spec("ray") is None:
        raise UserError("flower: not installed; pip install 'flwr[simulation]>=1.41,<1.43'")
