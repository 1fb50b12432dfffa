"""`fedman list`: every name and key that a command accepts."""

from __future__ import annotations

from dataclasses import fields

import typer


def print_listing() -> None:
    """Algorithms with their hyper-parameters, data sets, models, presets, and all keys."""
    from fedman.algorithms import ALGORITHMS, hyperparameters
    from fedman.config import KEYS, resolve
    from fedman.data import SPECS
    from fedman.models import MODELS
    from fedman.paper.presets import PRESETS, SWEEPS

    typer.echo("algorithms")
    for name, algorithm in ALGORITHMS.items():
        hyper = " ".join(f"{k}={v}".lower() for k, v in hyperparameters(algorithm).items())
        typer.echo(f"  {name:14} {algorithm.title:9} {hyper}".rstrip())
    typer.echo("data sets")
    for name, spec in SPECS.items():
        shape = "x".join(map(str, spec.shape))
        typer.echo(f"  {name:14} {spec.classes} classes of {shape}, model {spec.model}")
    typer.echo("  npz:PATH       your own arrays: x_train, y_train, x_test, y_test, or x and y")
    typer.echo(f"models\n  {' '.join(MODELS)}")
    typer.echo("presets (the paper's settings, with its ζ; zeta=0 gives the plain algorithm)")
    for name, preset in PRESETS.items():
        config = resolve({}, preset)
        typer.echo(f"  {name:21} zeta={config.zeta} rounds={config.rounds} clients={config.clients}")
    typer.echo("sweeps (the paper's tables and figures; keys choose a part)")
    for name, sweep in SWEEPS.items():
        axes = " ".join(f"{key}={','.join(options)}" for key, options in sweep.grids[0].axes.items())
        more = f" and {len(sweep.grids) - 1} more grids" if len(sweep.grids) > 1 else ""
        typer.echo(f"  {name:21} {axes}{more}")
    typer.echo("keys")
    for name, field in KEYS.items():
        default = "" if field.default in (None, "") else f" [{field.default}]".lower()
        typer.echo(f"  {name:18} {field.description}{default}")
    owners: dict[tuple[str, str], list[str]] = {}
    for algorithm in ALGORITHMS.values():
        for own in fields(algorithm):
            owners.setdefault((own.name, own.metadata["description"]), []).append(algorithm.title)
    for (name, description), titles in owners.items():
        typer.echo(f"  {name:18} {description} ({', '.join(titles)})")
