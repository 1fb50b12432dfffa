"""What the harness has tried, and what held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Row:
    """A line of the table."""

    section: str
    what: str
    tried: int = 0
    held: int = 0
    failures: list[str] = field(default_factory=list)
    note: str = ""  # why a row could not be tried, or what it measured


@dataclass
class Tally:
    """The rows of one section."""

    section: str
    rows: dict[str, Row] = field(default_factory=dict)

    def row(self, what: str) -> Row:
        return self.rows.setdefault(what, Row(self.section, what))

    def check(self, what: str, problem: str | None) -> None:
        """One more try of `what`; it held if there is no problem."""
        row = self.row(what)
        row.tried += 1
        if problem:
            row.failures.append(problem)
        else:
            row.held += 1

    def count(self, what: str, held: int, tried: int, failures: Sequence[str] = ()) -> None:
        """Many tries at once."""
        row = self.row(what)
        row.tried, row.held = row.tried + tried, row.held + held
        row.failures += failures

    def note(self, what: str, text: str) -> None:
        """A figure, or the reason why there is none."""
        self.row(what).note = text
