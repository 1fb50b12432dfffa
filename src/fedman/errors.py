"""The errors a user can cause, as one line that names what is wrong, where, and what is allowed."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input: a config, a data file, a checkpoint. The command line prints it and exits with 2."""


class Diverged(Exception):
    """Every client of a round returned a non-finite model. The command line prints it and exits with 3."""


class StopRun(Exception):
    """Raised by a callback or a tracker that has seen a round: the run ends after it, and its summary says why."""


class TooFew(Exception):
    """Too few clients are there, or too few of their replies are good. The command line prints it and exits with 4."""


class Interrupted(Exception):
    """A signal ended the run after a checkpoint was written. The command line exits with 128 + the signal."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(signum, message)
        self.signum = signum

    def __str__(self) -> str:
        return str(self.args[1])


def one_line(text: object, limit: int = 200) -> str:
    """A text, or that of an exception, on one line of at most `limit` characters."""
    return " ".join(str(text).split())[:limit]


def describe(error: Exception, limit: int = 200) -> str:
    """An exception on one line: its type and its text."""
    return one_line(f"{type(error).__name__}: {error}", limit)


def shown(value: object, limit: int = 60) -> str:
    """A value in a message: one line, not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown_type(value: object) -> str:
    """A value's type in a message."""
    return "None" if value is None else f"a value of type {type(value).__name__}"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """'; did you mean X?', or nothing if no name is similar: one with a slip in three letters, or the whole of a word.

    >>> did_you_mean("mpl", ["mlp"]), did_you_mean("cifar", ["cifar10"]), did_you_mean("fednova", ["fedsam", "fedavg"])
    ('; did you mean mlp?', '; did you mean cifar10?', '')
    """
    word, known = word.lower(), {name.lower(): name for name in names}
    for near in difflib.get_close_matches(word, known, 3, 0.6):
        if _slips(word, near) <= len(word) / 3 or (len(word) > 3 and near.startswith(word)):
            return f"; did you mean {known[near]}?"
    return ""


def _slips(a: str, b: str) -> int:
    """How many letters must be inserted, deleted, replaced or swapped with the next to make b of a."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a):
        before, last, row = row, before, [i + 1]
        for j, other in enumerate(b):
            row.append(min(before[j + 1] + 1, row[j] + 1, before[j] + (letter != other)))
            if i and j and (letter, a[i - 1]) == (b[j - 1], other):
                row[-1] = min(row[-1], last[j - 1] + 1)
    return row[-1]


def nearest(word: str, names: Iterable[str]) -> str:
    """'; did you mean X?' or '; there are X, Y, …'."""
    names = list(names)
    return did_you_mean(word, names) or (f"; there are {', '.join(names)}" if len(names) <= 20 else "")
