"""The command line: commands, their options, what they show. pydantic, typer and rich stay at this edge."""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> None:
    """The `fedman` command; see `fedman.cli.commands.main`."""
    from fedman.cli import commands

    commands.main(arguments)
