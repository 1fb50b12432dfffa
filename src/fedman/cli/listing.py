"""`fedman list`: algorithms and all other parts, data sets, models, presets, sweeps and keys."""

from __future__ import annotations

from dataclasses import fields

import typer

from fedman.parts import hyperparameters


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
    typer.echo("presets (the paper's settings with its ζ, and small ones; zeta=0 gives the plain algorithm)")
    for name, preset in PRESETS.items():
        config = resolve({}, preset)
        typer.echo(f"  {name:21} zeta={config.zeta} rounds={config.rounds} clients={config.clients}")
    typer.echo("sweeps (tables and figures of the paper and of the field; keys choose a part)")
    for name, sweep in SWEEPS.items():
        axes = " ".join(f"{key}={','.join(options)}" for key, options in sweep.grids[0].axes.items())
        others = len(sweep.grids) - 1
        more = f" and {others} more grid{'s' if others > 1 else ''}" if others else ""
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
