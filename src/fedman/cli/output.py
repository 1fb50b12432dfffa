"""What commands print: messages, the result of a run, tables, how to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedman.errors import Interrupted

if TYPE_CHECKING:
    from fedman.config import Config
    from fedman.runs.records import Summary


def print_message(message: str) -> None:
    """A line on standard error."""
    lines = [line if len(line) < 800 else f"{line[:300]} … {line[-300:]}" for line in printable(message).split("\n")]
    typer.echo("fedman: " + "\n".join(lines), err=True)


def printable(text: str) -> str:
    """A text whose control characters, which a file or a word may contain, are escaped."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def print_result(config: Config, summary: Summary, out: Path) -> None:
    """The result of a run in a few lines: the headline of each model, other figures, the clients, where it is."""
    from fedman.runs.records import Headline, evaluated_on, figures, headline_of, how_run

    compared = headline_of(summary)
    found = {
        name: "  ".join(f"{model} {Headline(name).shown(value)}" for model, value in values.items())
        for name, values in figures(summary).items()
    }
    named = "" if compared == Headline() else f"{compared.name} "
    named += "" if (on := evaluated_on(summary["config"])) == "test" else f"on the {on} part "
    reached = summary["rounds_to_target"] or f"{config.rounds}+"
    target = f"; {config.target:g}{compared.unit} in round {reached}" if config.target else ""
    lines = [f"{config.method}: {named}{found.pop(compared.name, '')}{target}; {how_run(summary)}"]
    lines += [f"{name} {values}" for name, values in found.items()]
    if "stopped" in summary:
        lines.append(f"stopped after round {summary['round']} of {config.rounds}: {summary['stopped']}")
    if "clients" in summary:
        own = summary["clients"]
        of = {"mean": own["mean"], "worst tenth": own["worst_tenth"], "spread": own["spread"]}
        shown = "  ".join(f"{what} {compared.shown(value)}" for what, value in of.items())
        lines.append(f"clients on their own samples: {compared.name} {shown}")
    typer.echo(printable("\n".join([*lines, f"written to {out}"])))


def print_table(title: str, header: list[str], lines: list[list[str]]) -> None:
    """A table on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)), title_justify="left")
    for i, name in enumerate(header):
        table.add_column(Text(printable(name)), justify="right" if i else "left")
    for line in lines:
        table.add_row(*(Text(printable(cell)) for cell in line))
    console = Console()
    console.width = console.width if console.is_terminal else 120
    console.print(table)


@contextmanager
def say_how_to_resume(command: str) -> Iterator[None]:
    """Add the command that continues a run to the message of an interruption."""
    try:
        yield
    except Interrupted as error:
        raise Interrupted(error.signum, f"{error}; go on with{command}") from None
