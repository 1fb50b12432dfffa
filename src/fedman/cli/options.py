"""Options that several commands have, and the settings and the folder of a run made from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperCommand

from fedman.errors import UserError

if TYPE_CHECKING:
    from fedman.config import Config


class KeysCommand(TyperCommand):
    """A command that takes keys, and says so where one is written as an option: `--rounds 3`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from fedman.config import config_class, registered

            key = error.option_name.lstrip("-").replace("-", "_")
            if key in config_class(registered()).model_fields:
                raise UserError(f"{error.option_name}: not an option but a key; write {key}=VALUE") from None
            raise


def preset_names() -> list[str]:
    """What a shell completes --preset with."""
    from fedman.paper.presets import PRESETS, SWEEPS

    return [*PRESETS, *SWEEPS]


Keys = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings; see `fedman list`")]
PresetOption = Annotated[
    str | None, typer.Option(help="start from a preset; see `fedman list`", autocompletion=preset_names)
]
ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE.toml", help="settings from a file")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, or one GPU: cuda:0")]
Out = Annotated[Path | None, typer.Option(help="folder for the results", show_default="runs/NAME")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint in --out")]


def given_keys(keys: list[str] | None, config: Path | None) -> dict[str, Any]:
    """The keys of the file and of the command line, which takes precedence."""
    from fedman.runs.key_text import overrides, read_toml

    return {**(read_toml(config) if config else {}), **overrides(keys or [])}


def run_keys(
    keys: list[str] | None,
    preset: str | None,
    config: Path | None,
    out: Path | None,
    resume: bool,
    files: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The given keys; if a run is resumed without a preset, on top of those in its folder, in `files` too."""
    from fedman.runs.key_text import read_toml

    given = given_keys(keys, config)
    if resume and out is None:
        raise UserError("--resume: name the run's folder with --out")
    if resume and out is not None and not preset:
        from fedman.runs.folder import RunFolder

        folder = RunFolder(out)
        folder.refuse_unused()
        values = folder.read_config()
        for name in files:
            values |= read_toml(out / name) if not given or (out / name).exists() else {}
        given = values | given
    return given


def run_folder(out: Path | None, config: Config, prefix: str = "") -> Path:
    """The folder of a run, named after its settings by default."""
    dataset = Path(config.dataset.removeprefix("npz:")).stem
    name = f"{dataset}-{config.partition}-{config.algorithm}-zeta{config.zeta:g}-seed{config.seed}"
    return out or Path("runs") / f"{prefix}{name}"
