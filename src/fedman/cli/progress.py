"""Progress a person can follow: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from fedman.runs.records import RoundRecord

EVERY = 10.0  # seconds between plain lines


def described(record: RoundRecord) -> str:
    """The figures of a round in a few words."""
    accuracy = f"{record['accuracy']['all']:.2f} %" if "all" in record["accuracy"] else ""
    lost = f", {len(record['quarantined'])} quarantined" if record["quarantined"] else ""
    return f"loss {record['loss']:.3f} {accuracy}{lost}"


@contextmanager
def run_progress(title: str, rounds: int) -> Iterator[Callable[[RoundRecord], None]]:
    """Follows one run."""
    with sweep_progress({0: (rounds, rounds)}, 1) as on_cell:
        yield on_cell(0, title)


@contextmanager
def sweep_progress(
    work: Mapping[int, tuple[int, float]], total: int
) -> Iterator[Callable[[int, str], Callable[[RoundRecord], None]]]:
    """Follows the runs that are left of `total`, given by number as (rounds, cost): call it with number and name.

    The time left is that of the work done since the first round, which has kernels to compile and graphs to capture,
    scaled to the cost of what is to come; nothing is said before there is something to go by.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"), console=console,
    )  # fmt: skip
    terminal, whole = console.is_terminal, sum(cost for _, cost in work.values())
    task = bar.add_task("", total=whole, figures="", left="")
    began: float | None = None
    said = fresh = 0.0
    played = dict.fromkeys(work, 0)

    def on_cell(i: int, name: str) -> Callable[[RoundRecord], None]:
        number = f"[{i + 1}/{total}] " if total > 1 else ""
        rounds, cost = work[i]

        def advance(record: RoundRecord) -> None:
            nonlocal began, said, fresh
            now, last = time.monotonic(), record["round"] == rounds
            figures = f"round {record['round']}/{rounds} {described(record)}"
            if began is None:
                began = now
            else:
                fresh += cost / rounds
            played[i] = record["round"]
            done = sum(work[k][1] * t / work[k][0] for k, t in played.items())
            known = fresh > 0 and now - began >= 1
            left = f"{duration((now - began) / fresh * (whole - done))} left" if known else ""
            bar.update(task, completed=done, description=number + name, figures=figures, left=left)
            if not terminal and (last or now - said >= EVERY):
                said = now
                print(f"{number}{name} {figures} {left}".rstrip(), file=sys.stderr)

        return advance

    if terminal:
        with bar:
            yield on_cell
    else:
        yield on_cell


def duration(seconds: float) -> str:
    """In the units a person would use.

    >>> duration(42), duration(400), duration(7500)
    ('42 s', '6 min 40 s', '2 h 05 min')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


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
