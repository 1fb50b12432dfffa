"""`fedman data ...`: download data sets, and show how they are split over clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedman.cli.options import Keys, KeysCommand, PresetOption

app = typer.Typer(no_args_is_help=True, help="Get data sets; show how they are split over clients.")


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="data set to download")],
    data_dir: Annotated[
        Path | None, typer.Option(help="where to", show_default="$FEDMAN_DATA or ~/.cache/fedman")
    ] = None,
    url: Annotated[str | None, typer.Option(help="a mirror; the checksum stays the official one")] = None,
) -> None:
    """Download the official archive of a data set of `fedman list`, with resume and checksum.

    fedman data get cifar100
    """
    from fedman.cli.progress import work_progress
    from fedman.data import download

    with work_progress() as advance:
        paths = download.get(name, data_dir, url=url, progress=advance)
    for path in paths:
        typer.echo(f"written to {path}")
    if not paths:
        typer.echo(f"{name} is part of the package; there is nothing to download")


@app.command(cls=KeysCommand)
def show(
    keys: Keys = None,
    preset: PresetOption = None,
    plot: Annotated[Path | None, typer.Option(help="draw class x client to a .png or .svg")] = None,
) -> None:
    """How a data set is split over the clients.

    fedman data show --preset cifar100-dir0.3 --plot partition.png
    """
    from fedman.config import resolve
    from fedman.data import load, partition, partition_picture, validation
    from fedman.paper.presets import find_preset
    from fedman.runs.key_text import overrides

    settings = resolve(overrides(keys or []), find_preset(preset))
    data = load(*settings.source)
    parts = partition.clients_of(
        data, settings.partition, settings.clients, seed=settings.partition_seed, sigma=settings.unbalanced
    )
    if settings.validation:
        held = validation.held_out(data.y_train, settings.validation, settings.partition_seed)
        parts = validation.without(parts, held)
    if plot is not None:
        partition_picture.draw(data.y_train, parts, data.classes, plot)
    facts = partition.heterogeneity(data.y_train, parts, data.classes)
    typer.echo(f"{settings.dataset}, {settings.partition}: " + ", ".join(f"{k} {v:.4g}" for k, v in facts.items()))
    if plot is not None:
        typer.echo(f"written to {plot}")
