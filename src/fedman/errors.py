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


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """'; did you mean X?', or nothing if no name is similar: a slip, which seldom changes the first letter.

    >>> did_you_mean("mpl", ["mlp"]), did_you_mean("criterion", ["partition"])
    ('; did you mean mlp?', '')
    """
    word, known = word.lower(), {name.lower(): name for name in names}
    for near in difflib.get_close_matches(word, known, 3, 0.6):
        if near[:1] == word[:1] or difflib.SequenceMatcher(None, near, word).ratio() > 0.8:
            return f"; did you mean {known[near]}?"
    return ""


def nearest(word: str, names: Iterable[str]) -> str:
    """'; did you mean X?' or '; there are X, Y, …'."""
    names = list(names)
    return did_you_mean(word, names) or (f"; there are {', '.join(names)}" if len(names) <= 20 else "")
