"""Tables as text: Markdown for people, CSV for programs, and means over seeds the way the paper prints them."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Sequence


def mean_std(values: Sequence[float], form: str = ".2f") -> str:
    """52.49 ± 0.36, with the sample standard deviation (n − 1); nan stands for a run that diverged.

    >>> mean_std([52.0, 53.0]), mean_std([52.0]), mean_std([])
    ('52.50 ± 0.71', '52.00', '–')
    """
    if not values:
        return "–"
    if not all(map(math.isfinite, values)):
        return "diverged"
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{spread}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown; a bar inside a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def comma_separated(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()
