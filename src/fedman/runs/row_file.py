"""The rows of clients on the run's disk: one file of records of equal length; a checkpoint says which are its own.

A record is never changed while one of the two newest checkpoints points at it: a row that has changed is written to a
free record, or to the end of the file. So a process can be killed at any moment, and a checkpoint costs as much as the
rows that have changed. Every vector of a row has a hash, which the checkpoint holds and every reader compares. Records
are read and written by position, not mapped into memory: a disk that fails is then an error and not a signal.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fedman.algorithms import State
from fedman.errors import UserError
from fedman.execution.memory import readable
from fedman.runs.atomic import refuse_link, writing

NAME = "clients.rows"
THREADS = 4  # that hash rows and copy them
CHECKED = 64 << 20  # bytes read at a time when all rows are checked
HASH = hashlib.sha256().digest_size

Value = TypeVar("Value")


class Damaged(UserError):
    """A record is not what was written."""


class Place(NamedTuple):
    """Where a client's row is, and the hashes of its vectors, one behind the other."""

    record: int
    hashes: bytes


@dataclass(frozen=True)
class Vector:
    """A vector's place in every record."""

    number: int
    offset: int  # in bytes
    like: Tensor  # [Q]


class RowFile:
    """The file `path` of rows like `row`, which is made when the first is written. Use it in a `with` statement."""

    def __init__(self, path: Path, row: State) -> None:
        self.path, self.places = path, dict[int, Place]()
        ends = [0]
        for v in row.values():
            ends.append(ends[-1] + v.nbytes)
        self.length = ends.pop()  # of a record
        self._vectors = {name: Vector(i, ends[i], v) for i, (name, v) in enumerate(row.items())}
        self._file = -1
        self._count = 0  # records in the file
        self._free: list[int] = []
        self._newest: set[int] = set()  # the records of the newest checkpoint
        self._held: set[int] = set()  # those of the two newest checkpoints

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def __contains__(self, client: object) -> bool:
        return client in self.places

    def write(self, clients: Sequence[int], rows: State) -> None:
        """Write rows, `[S, Q]` each, on the host."""
        content = {name: v.contiguous().view(torch.uint8).numpy() for name, v in rows.items()}
        with writing(self.path):
            if self._file < 0:
                refuse_link(self.path.parent)
                self.path.parent.mkdir(exist_ok=True)
                self._file = self._open(os.O_CREAT | os.O_TRUNC)
            records = self._take_free(len(clients))

            def put(i: int) -> Place:
                hashes = b""
                for name, vector in self._vectors.items():
                    own = memoryview(content[name][i])
                    hashes += hashlib.sha256(own).digest()
                    _write(self._file, own, records[i] * self.length + vector.offset)
                return Place(records[i], hashes)

            try:
                placed = _in_threads(put, len(clients))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise UserError(self._no_room(error, len(clients) * self.length)) from None
        for k, place in zip(clients, placed, strict=True):
            before = self.places.get(k)
            if before and before.record not in self._held:
                self._free.append(before.record)
            self.places[k] = place

    def read(self, name: str, clients: Sequence[int]) -> Tensor:
        """One vector of these clients, `[S, Q]` on the host."""
        return self._read(self._file, self.places, name, clients)

    def tensors(self, clients: Sequence[int]) -> dict[str, Tensor]:
        """Where these clients' rows are, for a checkpoint. Of those before, the caller may keep the newest."""
        if self._file >= 0:
            with writing(self.path):
                os.fsync(self._file)
        used = {place.record for place in self.places.values()}
        if used != self._newest:
            self._held, self._newest = used | self._newest, used
            self._free = [i for i in reversed(range(self._count)) if i not in self._held]
        hashes = bytearray(b"".join(self.places[k].hashes for k in clients))
        return {
            "rows.record": torch.tensor([self.places[k].record for k in clients], dtype=torch.int64),
            "rows.sha256": torch.frombuffer(hashes, dtype=torch.uint8) if hashes else torch.empty(0, dtype=torch.uint8),
        }

    def restore(self, clients: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Go back to what a checkpoint says, if every row of it is sound.

        All records that the file has stay as they are until the next checkpoint: the one before may point at them.
        """
        records, hashes = tensors["rows.record"].tolist(), bytes(tensors["rows.sha256"].numpy())
        each = HASH * len(self._vectors)
        if (len(records), len(hashes)) != (len(clients), len(clients) * each):
            raise Damaged(f"{self.path}: {len(records)} records for {len(clients)} clients")
        if not clients:
            return
        own = [Place(record, hashes[i * each : (i + 1) * each]) for i, record in enumerate(records)]
        places = dict(zip(clients, own, strict=True))
        try:
            file = self._open()
        except OSError as error:
            raise Damaged(f"{self.path}: {error.strerror}") from None
        try:
            some = max(1, CHECKED // self.length)
            for name in self._vectors:
                for i in range(0, len(clients), some):
                    self._read(file, places, name, clients[i : i + some])
        except UserError:
            os.close(file)
            raise
        self._file, self.places = file, places
        self._count = -(-os.fstat(file).st_size // self.length)
        self._newest, self._held = set(records), set(range(self._count))

    def require_room(self, clients: float) -> None:
        """Refuse a run that will leave behind the rows of so many clients, if the disk has no room for them."""
        folder = next(parent for parent in self.path.parents if parent.exists())
        free = shutil.disk_usage(folder).free + (self.path.stat().st_size if self.path.is_file() else 0)
        if clients * self.length > free:
            raise UserError(
                f"{self.path}: the state of about {clients:,.0f} clients that take part, {readable(self.length)} each, "
                f"needs {readable(clients * self.length)} and {readable(free)} are free on this disk; "
                "use a folder on a larger one, or fewer rounds"
            )

    def _open(self, flags: int = 0) -> int:
        """A symbolic link in the file's place is an error."""
        return os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666)

    def _take_free(self, count: int) -> list[int]:
        """Records that no checkpoint points at, the first of them first."""
        found = [self._free.pop() for _ in range(min(count, len(self._free)))]
        more = range(self._count, self._count + count - len(found))
        self._count = more.stop
        return [*found, *more]

    def _read(self, file: int, places: Mapping[int, Place], name: str, clients: Sequence[int]) -> Tensor:
        vector = self._vectors[name]
        found = torch.empty(len(clients), *vector.like.shape, dtype=vector.like.dtype)
        content = found.view(torch.uint8).numpy()
        at = HASH * vector.number

        def get(i: int) -> None:
            place, own = places[clients[i]], memoryview(content[i])
            whole = _read(file, own, place.record * self.length + vector.offset)
            if not whole or hashlib.sha256(own).digest() != place.hashes[at : at + HASH]:
                why = "its hash differs" if whole else "the file ends before it does"
                raise Damaged(f"{self.path}: damaged where the row of client {clients[i]} is; {why}")

        try:
            _in_threads(get, len(clients))
        except OSError as error:
            raise Damaged(f"{self.path}: {error.strerror}") from None
        return found

    def _no_room(self, error: OSError, needed: int) -> str:
        free = shutil.disk_usage(self.path.parent).free
        return f"{self.path}: cannot be written: {error.strerror} ({readable(needed)} needed, {readable(free)} free)"


def _write(file: int, content: memoryview, offset: int) -> None:
    while content:
        done = os.pwrite(file, content, offset)
        content, offset = content[done:], offset + done


def _read(file: int, into: memoryview, offset: int) -> bool:
    """Fill a buffer; False if the file ends before, which a hash need not show: the memory may hold what was there."""
    while into and (done := os.preadv(file, [into], offset)):
        into, offset = into[done:], offset + done
    return not into


def _in_threads(function: Callable[[int], Value], count: int) -> list[Value]:
    """Of 0 to `count` − 1. Hashing and copying run outside Python's lock."""
    if count == 1:
        return [function(0)]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, range(count)))
