"""The command line: commands, their options, progress and output. typer and rich are imported here only."""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> None:
    """The `fedman` command; see `fedman.cli.commands.main`."""
    from fedman.cli import commands

    commands.main(arguments)
