"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
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

if TYPE_CHECKING:
    from fedman.config import Config
    from fedman.runs.records import Progress as OnRound
    from fedman.runs.records import RoundRecord

EVERY = 10.0  # seconds between plain lines


def format_round(record: RoundRecord) -> str:
    """Loss and headline of a round in a few words."""
    from fedman.runs.records import Headline, figures

    words = [f"loss {record['loss']:.3f}"]
    name, values = next(iter(figures(record).items()), ("", {}))
    if "all" in values:
        words += [name] * (name != Headline.name) + [Headline(name).shown(values["all"])]
    lost = f", {len(record['quarantined'])} quarantined" if record["quarantined"] else ""
    return f"{' '.join(words)}{lost}"


@contextmanager
def run_progress(config: Config) -> Iterator[OnRound]:
    """Progress of one run."""
    title = f"{config.method} · {config.dataset} {config.partition}"
    with sweep_progress({0: (title, config.rounds, config.rounds)}, 1) as (advance,):
        yield advance


@contextmanager
def sweep_progress(work: Mapping[int, tuple[str, int, float]], total: int) -> Iterator[list[OnRound]]:
    """Progress of a sweep of `total` runs; `work` holds (name, rounds, cost) of the unfinished ones by number.

    The time left is extrapolated by cost from the rounds after the first, which compiles kernels and captures graphs;
    it is not shown before a second has passed.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"), console=console, disable=not console.is_terminal,
    )  # fmt: skip
    whole = sum(cost for *_, cost in work.values())
    task = bar.add_task("", total=whole, figures="", left="")
    started: float | None = None
    printed = cost_since = 0.0
    cost_done = dict.fromkeys(work, 0.0)

    def advance(i: int, record: RoundRecord) -> None:
        nonlocal started, printed, cost_since
        name, rounds, cost = work[i]
        now, last = time.monotonic(), record["round"] == rounds
        number = f"[{i + 1}/{total}] " if total > 1 else ""
        figures = f"round {record['round']}/{rounds} {format_round(record)}"
        if started is None:
            started = now
        else:
            cost_since += cost / rounds
        cost_done[i] = cost * record["round"] / rounds
        done = sum(cost_done.values())
        known = cost_since > 0 and now - started >= 1
        left = f"{duration((now - started) / cost_since * (whole - done))} left" if known else ""
        bar.update(task, completed=done, description=number + name, figures=figures, left=left)
        if bar.disable and (last or now - printed >= EVERY):
            printed = now
            print(f"{number}{name} {figures} {left}".rstrip(), file=sys.stderr)

    with bar:
        yield [partial(advance, i) for i in work]


def duration(seconds: float) -> str:
    """Seconds in the units a person would use.

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
def work_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Progress of other work: call the function with what is done, how much of it, and the total (0: unknown)."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    printed = time.monotonic()

    def advance(what: str, done: int, total: int) -> None:
        nonlocal printed
        bar.update(task, description=what, completed=done, total=total or None)
        if bar.disable and time.monotonic() - printed >= EVERY:
            printed = time.monotonic()
            print(f"{what} {done}/{total or '?'}", file=sys.stderr)

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield advance
