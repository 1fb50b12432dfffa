"""Checksums inside files of JSON: a changed value, a changed line and a lost line are noticed when the file is read.

They are there for accidents of disks, copies and editors. Whoever changes a file on purpose can change its sums too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedman.errors import UserError

SUMMED = re.compile(rb'(\{.*), "sum": "([0-9a-f]{16})"\}', re.DOTALL)


def sha256(content: bytes) -> str:
    """The hash of a file's contents."""
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path) -> str:
    """The same for a file too large to be held in memory twice."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(values: Mapping[str, object]) -> str:
    """The hash of a JSON object but for its own field `sha256`, which holds it."""
    rest = {key: value for key, value in values.items() if key != "sha256"}
    return sha256(json.dumps(rest, sort_keys=True).encode())


class Chain:
    """Lines of JSON objects; the field `sum` of each is a hash of the `sum` before it and of the line itself.

    A file that grows starts from nothing, and its end may be lost unnoticed. A file that is written whole starts from
    its number of lines.
    """

    def __init__(self, start: int | str = "") -> None:
        self.last = str(start)

    def line(self, record: Mapping[str, object]) -> bytes:
        """The next line to write."""
        content = json.dumps(record, ensure_ascii=False).encode()
        return content[:-1] + f', "sum": "{self._next(content)}"}}\n'.encode()

    def content(self, line: bytes, where: str) -> bytes:
        """The next line that was read, without its sum."""
        found = SUMMED.fullmatch(line)
        if found is None:
            raise UserError(f"{where}: damaged (no checksum, which other lines have)")
        content = found[1] + b"}"
        if self._next(content) != found[2].decode():
            raise UserError(f"{where}: damaged (its checksum differs: the line was changed, or lines are missing)")
        return content

    def _next(self, content: bytes) -> str:
        self.last = sha256(self.last.encode() + content)[:16]
        return self.last


def chained(records: Iterable[Mapping[str, object]]) -> str:
    """A file of these records, written whole."""
    records = list(records)
    chain = Chain(len(records))
    return b"".join(map(chain.line, records)).decode()


def is_summed(lines: Iterable[bytes]) -> bool:
    """Whether any line has a checksum: files of earlier versions have none."""
    return any(map(SUMMED.fullmatch, lines))
