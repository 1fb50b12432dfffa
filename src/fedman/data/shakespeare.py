"""The embedded text: next character in Shakespeare's plays, the speakers are the clients (see SHAKESPEARE.md)."""

from __future__ import annotations

import gzip
from importlib import resources
from pathlib import Path

import numpy as np

from fedman.data.catalog import PADDING, Progress, Spec
from fedman.data.client_indices import consecutive

SHORTEST = 2_000  # characters that a speaker needs to be a client
TEST_SHARE = 5  # one in so many of a speaker's characters, the last ones

Windows = tuple[np.ndarray, np.ndarray]
"""Ids of characters [n, T], and of the characters that follow."""


def read(spec: Spec, root: Path, progress: Progress | None = None) -> tuple[object, ...]:
    """x and y for training and testing, each client's training and test windows, the speakers' names."""
    text = gzip.decompress(resources.files("fedman.data").joinpath("shakespeare.txt.gz").read_bytes()).decode("ascii")
    said = speakers(text)
    codes = np.frombuffer("".join(said.values()).encode("ascii"), np.uint8)
    ids = np.searchsorted(np.array(sorted(map(ord, set(text)))), codes)
    texts = np.split(ids, np.cumsum([len(words) for words in said.values()])[:-1])
    train, test = zip(*(_halves(each, spec.shape[0]) for each in texts), strict=True)
    parts = [consecutive([len(y) for _, y in half]) for half in (train, test)]
    return *_joined(train), *_joined(test), *parts, list(said)


def speakers(text: str) -> dict[str, str]:
    """What each speaker with enough text says in all, by name."""
    said: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        name, colon, words = block.strip("\n").partition(":\n")
        if colon:
            said.setdefault(name, []).append(words)
    joined = {name: "\n".join(words) for name, words in said.items()}
    return {name: words for name, words in joined.items() if len(words) >= SHORTEST}


def _halves(ids: np.ndarray, length: int) -> tuple[Windows, Windows]:
    """A text's training windows, without the remainder, and its test windows, the last one padded."""
    cut = len(ids) - len(ids) // TEST_SHARE
    whole = (cut - 1) // length * length
    return windows(ids[: whole + 1], length), windows(ids[cut - 1 :], length)


def windows(ids: np.ndarray, length: int) -> Windows:
    """A text as windows in which each of its characters but the first is the target of one position.

    >>> windows(np.array([5, 6, 7, 8]), 2)
    (array([[5, 6],
           [7, 0]]), array([[ 6,  7],
           [ 8, -1]]))
    """
    n = -(-(len(ids) - 1) // length)
    x, y = np.zeros(n * length, np.int64), np.full(n * length, PADDING, np.int64)
    x[: len(ids) - 1], y[: len(ids) - 1] = ids[:-1], ids[1:]
    return x.reshape(n, length), y.reshape(n, length)


def _joined(clients: tuple[Windows, ...]) -> Windows:
    return np.concatenate([x for x, _ in clients]), np.concatenate([y for _, y in clients])
