"""Progress a person can follow: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

EVERY = 10.0  # seconds between plain lines


def described(record: dict[str, Any]) -> str:
    """The figures of a round in a few words."""
    accuracy = f"{record['accuracy']['all']:.2f} %" if "all" in record["accuracy"] else ""
    lost = f", {len(record['quarantined'])} quarantined" if record["quarantined"] else ""
    return f"loss {record['loss']:.3f} {accuracy}{lost}"


@contextmanager
def run_progress(title: str, rounds: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Follows one run."""
    with sweep_progress([rounds]) as on_cell:
        yield on_cell(0, title)


@contextmanager
def sweep_progress(rounds: list[int]) -> Iterator[Callable[[int, str], Callable[[dict[str, Any]], None]]]:
    """Follows runs of so many rounds: call it with a run's number and name."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), TimeRemainingColumn(), console=console,
    )  # fmt: skip
    terminal = console.is_terminal
    task = bar.add_task("", total=sum(rounds), figures="")
    started, said, fresh = time.monotonic(), 0.0, 0
    done_by: dict[int, int] = {}

    def on_cell(i: int, name: str) -> Callable[[dict[str, Any]], None]:
        done_by[i] = 0
        number = f"[{i + 1}/{len(rounds)}] " if len(rounds) > 1 else ""

        def advance(record: dict[str, Any]) -> None:
            nonlocal said, fresh
            figures = described(record)
            done_by[i], fresh = record["round"], fresh + 1
            done = sum(done_by.values())
            bar.update(task, completed=done, description=number + name, figures=figures)
            now, last = time.monotonic(), record["round"] == rounds[i]
            if not terminal and (last or now - said >= EVERY):
                said = now
                left = (now - started) / fresh * (sum(rounds) - done)
                print(
                    f"{number}{name} round {record['round']}/{rounds[i]} {figures} {left:.0f} s left",
                    file=sys.stderr,
                )

        return advance

    if terminal:
        with bar:
            yield on_cell
    else:
        yield on_cell


@contextmanager
def data_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Follows transfers and the decoding of images: call it with what, how much is done, and of how much (or 0)."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)


@contextmanager
def work_progress() -> Iterator[Callable[[str, int, int], None]]:
    """`data_progress` for long work: off a terminal a line now and then says how far it is."""
    if Console(stderr=True).is_terminal:
        with data_progress() as follow:
            yield follow
        return
    said, before = time.monotonic(), ""

    def line(what: str, done: int, total: int) -> None:
        nonlocal said, before
        now = time.monotonic()
        if what != before or now - said >= EVERY:
            said, before = now, what
            print(f"{what} {done}/{total}", file=sys.stderr)

    yield line


def print_table(title: str, header: list[str], lines: list[list[str]]) -> None:
    """A table for a person."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left")
    for line in lines:
        table.add_row(*line)
    console = Console()
    console.width = console.width if console.is_terminal else 120
    console.print(table)
