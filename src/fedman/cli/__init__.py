"""The command line: commands, their options, progress and output. typer and rich are imported here only."""

from fedman.cli.commands import main

__all__ = ["main"]
