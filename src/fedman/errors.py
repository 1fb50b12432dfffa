"""The errors a user can cause, as one line that names what is wrong, where, and what is allowed."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input: a config, a data file, a checkpoint. The command line prints it and exits with 2."""


class Diverged(Exception):
    """Every client of a round returned a non-finite model. The command line prints it and exits with 3."""


class TooFew(Exception):
    """Too few clients are there, or too few of their replies are good. The command line prints it and exits with 4."""


class Interrupted(Exception):
    """A signal ended the run after a checkpoint was written. The command line exits with 128 + the signal."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """'; did you mean X?', or nothing if no name is similar: a slip, which seldom changes the first letter.

    >>> did_you_mean("mpl", ["mlp"]), did_you_mean("criterion", ["partition"])
    ('; did you mean mlp?', '')
    """
    lower = word.lower()
    for name in difflib.get_close_matches(lower, names, 3, 0.6):
        if name[:1].lower() == lower[:1] or difflib.SequenceMatcher(None, name.lower(), lower).ratio() > 0.8:
            return f"; did you mean {name}?"
    return ""


def nearest(word: str, names: Iterable[str]) -> str:
    """'; did you mean X?' or '; there are X, Y, …'."""
    names = list(names)
    return did_you_mean(word, names) or (f"; there are {', '.join(names)}" if len(names) <= 20 else "")
