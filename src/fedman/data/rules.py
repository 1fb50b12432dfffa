"""What the names of a partition and of a data set say about clients: all that checking keys needs, without numpy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from fedman.data.catalog import SCHEMES, SPECS, own_files
from fedman.errors import UserError

if TYPE_CHECKING:
    from fedman.data.dataset import Dataset

_RULE = re.compile(r"(iid)|(dir)(\d+\.?\d*|\.\d+)|(path)(\d+)", re.ASCII)
_GIVEN = re.compile(r"(natural)|(file):(.+)|(custom)-([0-9a-f]{12})|()((?:\w+\.)*\w+:\w[\w.]*)")
RULES = ("iid", "dir", "path")  # kinds that split labels
FORMATS = (".npy", ".npz", ".json")  # of a file that holds a partition


class Rule(NamedTuple):
    """A partition's kind: "iid", "dir" (`number` is δ), "path" (classes per client), "natural", "file" and "module"
    (`source` is where it is), "custom" (given in Python, `source` is its fingerprint)."""

    kind: str
    number: float = 0.0
    source: str = ""


def parse(spec: str) -> Rule:
    """What a partition's name means.

    >>> parse("dir0.3")
    Rule(kind='dir', number=0.3, source='')
    """
    if match := _GIVEN.fullmatch(spec):
        kind, *source = (group for group in match.groups() if group is not None)
        return Rule(kind or "module", source="".join(source))
    match = _RULE.fullmatch(spec)
    kind, *number = filter(None, match.groups()) if match else ("",)
    value = float(number[0]) if number else 0.0
    if kind != "iid" and not 0 < value <= 1e6:
        raise UserError(
            f"partition: {spec[:60]!r} is not allowed; allowed are iid, dirX (Dirichlet, 0 < X <= 1e6: dir0.3), "
            "pathC (C >= 1 classes per client: path2), natural (the data's own clients), file:PATH "
            f"({', '.join(FORMATS)}) and module:function"
        )
    return Rule(kind, value)


def natural_clients(source: str | Dataset) -> int | None:
    """The number of clients that the data set itself names; None if it names none.

    Files that must be read for it are kept for the next `load`.
    """
    if not isinstance(source, str):
        return None if source.parts is None else len(source.parts)
    if source in SPECS:
        return SPECS[source].clients if SPECS[source].partition == "natural" else None
    own = own_files(source)
    if not own or not SCHEMES[own[0]].natural:
        return None
    from fedman.data.dataset import load

    return natural_clients(load(source))
