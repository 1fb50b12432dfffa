"""LEAF's JSON (FEMNIST, Shakespeare, Sent140, ...): clients with samples of their own.

A file holds {"users": [name, ...], "num_samples": [n, ...], "user_data": {name: {"x": [...], "y": [...]}}}. Lists of
numbers are samples as they are. Strings become ids of their characters, in the order of the sorted vocabulary of all
files; a target of one character is what follows the sample, and counts at its last position, as in LEAF.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedman.data import files
from fedman.data.catalog import PADDING
from fedman.data.client_indices import consecutive
from fedman.data.convert import own_test_parts
from fedman.data.dataset import Dataset, check_kind, check_samples, from_arrays
from fedman.errors import UserError, one_line

MAX_FILE = 1 << 30  # bytes of one JSON file; a file is read at a time
MAX_BYTES = 16 << 30  # of all samples in memory
TEST_SHARE = 5  # of a file without a test set, one in so many of a client's samples, the last ones

Stamp = tuple[str, int, int]
"""A file's path, size and time of change."""


class Samples(NamedTuple):
    """A client's samples. `text` says which of x and y are code points of characters, not yet ids."""

    x: np.ndarray
    y: np.ndarray
    text: tuple[bool, bool]

    def cut(self, rows: slice) -> Samples:
        return Samples(self.x[rows], self.y[rows], self.text)


Clients = dict[str, Samples]


def read(path: Path) -> Dataset:
    """The data set in a folder with train/*.json and test/*.json, or in one file. The last one read is kept."""
    return _read(path, *(tuple(map(_stamp, each)) for each in _listing(path)))


def _listing(path: Path) -> tuple[list[Path], list[Path]]:
    """The files of the training and of the test set."""
    if not path.is_dir():
        return [path], []
    train, test = (sorted((path / half).glob("*.json")) for half in ("train", "test"))
    if not train or not test:
        raise UserError(f"{path}: has no train/*.json or no test/*.json, as LEAF writes them")
    return train, test


def _stamp(path: Path) -> Stamp:
    if not path.exists():
        raise UserError(f"{path}: is missing")
    info = files.check_regular(path)
    return str(path), info.st_size, info.st_mtime_ns


@lru_cache(maxsize=1)
def _read(path: Path, train_files: tuple[Stamp, ...], test_files: tuple[Stamp, ...]) -> Dataset:
    train = _clients(train_files)
    test = _clients(test_files) if test_files else {}
    if not test_files:
        train, test = _split(path, train)
    return _dataset(path, train, test)


def _clients(stamps: tuple[Stamp, ...]) -> Clients:
    """The clients of several files, in their order."""
    found: Clients = {}
    size = 0
    for name, _, _ in stamps:
        for user, samples in _file(Path(name)).items():
            if user in found:
                raise UserError(f"{name}: user {user} is also in another file")
            found[user] = samples
            size += samples.x.nbytes + samples.y.nbytes
            if size > MAX_BYTES:
                raise UserError(f"{name}: takes more than the {MAX_BYTES} bytes of memory that are allowed")
    return found


def _file(path: Path) -> Clients:
    """The clients of one file, if it is what it says."""
    try:
        content = json.loads(files.read_plain(path, MAX_FILE))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not a whole JSON file ({one_line(error, 80)})") from error
    kinds = {"users": list, "num_samples": list, "user_data": dict}
    for key, kind in kinds.items():
        if not isinstance(content, dict) or not isinstance(content.get(key), kind):
            raise UserError(f"{path}: has no {key}; a file of LEAF has {', '.join(kinds)}")
    users, sizes, data = (content[key] for key in kinds)
    if not users:
        raise UserError(f"{path}: has no users")
    if len(users) != len(sizes):
        raise UserError(f"{path}: has {len(users)} users but {len(sizes)} num_samples")
    found: Clients = {}
    for i, (user, size) in enumerate(zip(users, sizes, strict=True)):
        if not isinstance(user, str) or not user.isprintable() or len(user) > 200:
            raise UserError(f"{path}: users[{i}] is no name of a line")
        if user in found:
            raise UserError(f"{path}: user {user} is there twice")
        if user not in data:
            raise UserError(f"{path}: user {user} has no user_data")
        found[user] = _user(f"{path}: user {user}", data.pop(user), size)
    if data:
        raise UserError(f"{path}: user_data has {next(iter(data))[:60]!r}, who is not among the users")
    return found


def _user(where: str, given: Any, size: object) -> Samples:
    x, y = (given.get(key) if isinstance(given, dict) else None for key in ("x", "y"))
    if not isinstance(x, list) or not isinstance(y, list):
        raise UserError(f"{where}: has no lists x and y")
    if len(x) != size or len(y) != size:
        raise UserError(f"{where}: has {len(x)} x and {len(y)} y, but num_samples says {size!r:.40}")
    if not x:
        raise UserError(f"{where}: has no samples")
    text = isinstance(x[0], str), isinstance(y[0], str)
    if text == (False, True):
        raise UserError(f"{where}: y is text but x is not; targets are numbers there")
    if text == (False, False):
        return Samples(*check_samples(where, ("x", "y"), x, y), text)
    codes = _code_points(f"{where}: x", x)
    if text == (True, False):
        return Samples(*check_samples(where, ("x", "y"), codes, y), text)
    following = _code_points(f"{where}: y", y)
    if following.shape[1] not in (1, codes.shape[1]):
        raise UserError(
            f"{where}: y has {following.shape[1]} characters for the {codes.shape[1]} of x; wanted is the next one, or "
            "one for each"
        )
    return Samples(codes, following, text)


def _code_points(where: str, texts: list[Any]) -> np.ndarray:
    """Strings of one length as their characters' code points, int64 [n, T]."""
    length = len(texts[0])
    for i, each in enumerate(texts):
        if not isinstance(each, str) or len(each) != length or not each:
            what = f"{len(each)} characters" if isinstance(each, str) else type(each).__name__
            raise UserError(
                f"{where} of sample {i} is {what}; all must be text of one length, that of sample 0: {length}"
            )
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), "<u4")
    return codes.reshape(len(texts), length).astype(np.int64)


def _split(path: Path, clients: Clients) -> tuple[Clients, Clients]:
    """The last fifth of each client's samples, and at least one, is for testing."""
    train, test = {}, {}
    for user, samples in clients.items():
        n = len(samples.y)
        cut = n - max(1, n // TEST_SHARE)
        if cut < 1:
            raise UserError(f"{path}: user {user} has 1 sample; a file without a test set needs 2 of each user")
        train[user], test[user] = samples.cut(slice(None, cut)), samples.cut(slice(cut, None))
    return train, test


def _dataset(path: Path, train: Clients, test: Clients) -> Dataset:
    _check_alike(path, [*train.items(), *test.items()])
    text_x, text_y = next(iter(train.values())).text
    x, x_test = (np.concatenate([samples.x for samples in half.values()]) for half in (train, test))
    y, y_test = (np.concatenate([samples.y for samples in half.values()]) for half in (train, test))
    if text_x:
        texts = (x, x_test, y, y_test) if text_y else (x, x_test)
        vocabulary = np.unique(np.concatenate([np.unique(text) for text in texts]))
        x, x_test = (np.searchsorted(vocabulary, text) for text in (x, x_test))
        if text_y:
            y, y_test = (_targets(np.searchsorted(vocabulary, text), x.shape[1]) for text in (y, y_test))
    parts, test_parts = (consecutive([len(samples.y) for samples in half.values()]) for half in (train, test))
    return from_arrays(
        *(x, y, x_test, y_test, str(path)),
        parts=parts,
        test_parts=own_test_parts(str(path), list(train), dict(zip(test, test_parts, strict=True))),
        client_names=list(train),
        ids=True if text_x else None,
    )


def _check_alike(path: Path, clients: list[tuple[str, Samples]]) -> None:
    """Refuse clients whose samples are of another kind than the first one's. Whole numbers among others are numbers."""
    _, first = clients[0]
    for user, samples in clients:
        if samples.text != first.text:
            raise UserError(f"{path}: user {user} has text where the first user has numbers, or the other way round")
        for field, what, ours, theirs in zip("xy", ("samples", "targets"), samples[:2], first[:2], strict=True):
            same = ours.astype(theirs.dtype, copy=False)
            check_kind(f"{path}: user {user}", (field, "that of the first user"), what, same, theirs)


def _targets(ids: np.ndarray, length: int) -> np.ndarray:
    """Targets of every position; of the next character alone, that of the last position."""
    if ids.shape[1] == length:
        return ids
    y = np.full((len(ids), length), PADDING)
    y[:, -1:] = ids
    return y
