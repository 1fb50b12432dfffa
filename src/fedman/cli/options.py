"""What the commands share: options, where settings come from, what is said at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedman.errors import UserError

if TYPE_CHECKING:
    from fedman.config import Config
    from fedman.runs.records import Summary

Keys = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings; see `fedman list`")]
PresetOption = Annotated[str | None, typer.Option(help="start from a preset; see `fedman list`")]
ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE.toml", help="settings from a file")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Out = Annotated[Path | None, typer.Option(help="folder for the results", show_default="runs/NAME")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint in --out")]


def given_keys(
    keys: list[str] | None,
    preset: str | None,
    config: Path | None,
    out: Path | None,
    resume: bool,
    files: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The keys of the file and of the command line; if there are none, those of the run in `out` and of its `files`."""
    from fedman.config import overrides, read_toml

    given: dict[str, Any] = {**(read_toml(config) if config else {}), **overrides(keys or [])}
    if resume and out is None:
        raise UserError("--resume: name the run's folder with --out")
    if resume and out is not None and not given and not preset:
        from fedman.runs.folder import RunFolder

        given = RunFolder(out).read_config()
        for name in files:
            given |= read_toml(out / name)
    return given


def run_folder(out: Path, resume: bool) -> Path:
    """A folder that is the run's own."""
    from fedman.runs.folder import RunFolder

    if not resume:
        RunFolder(out).refuse_used()
    return out


def tell(config: Config, summary: Summary, out: Path) -> None:
    """The result of a run in two lines."""
    accuracy = "  ".join(f"{name} {value:.2f} %" for name, value in summary["accuracy"].items())
    reached = summary["rounds_to_target"] or f"{config.rounds}+"
    target = f"; {config.target:g} % in round {reached}" if config.target else ""
    how = f"{summary['seconds']:.1f} s on {summary['device']}, {summary['precision']}"
    typer.echo(f"{config.method}: {accuracy}{target}; {how}")
    typer.echo(f"written to {out}")


def run_name(config: Config) -> str:
    """The folder of a run that was given none."""
    dataset = Path(config.dataset.removeprefix("npz:")).stem
    return f"{dataset}-{config.partition}-{config.algorithm}-zeta{config.zeta:g}-seed{config.seed}"


def say(message: str) -> None:
    """A line for the person, apart from the results. What a file or a word brought along is not printed raw."""
    text = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message)
    lines = [line if len(line) < 800 else f"{line[:300]} … {line[-300:]}" for line in text.split("\n")]
    typer.echo("fedman: " + "\n".join(lines), err=True)
