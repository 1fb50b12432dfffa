"""Which samples belong to which client: a list of index arrays, one for each client, checked in one place."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from fedman.errors import UserError, one_line


def check_parts(
    where: str, parts: Any, samples: int, clients: int | None, names: Sequence[str] | None = None
) -> list[np.ndarray]:
    """`parts` as int64 arrays in ascending order, if they are whole numbers in 0 to `samples` − 1, none of them twice
    and no part empty. There must be as many parts as `clients` and as `names`, where these are given."""
    if not hasattr(parts, "__len__") or isinstance(parts, str | bytes | dict):
        raise UserError(f"{where}: is {type(parts).__name__}; wanted is a list of index arrays, one for each client")
    if clients is not None and len(parts) != clients:
        raise UserError(f"{where}: has {len(parts)} parts for {clients} clients")
    if names is not None and len(parts) != len(names):
        raise UserError(f"{where}: has {len(parts)} parts for {len(names)} client names")
    if len(parts) == 0:
        raise UserError(f"{where}: has no parts; at least one client is needed")
    owner = np.full(samples, -1)
    found = []
    for k, part in enumerate(parts):
        mine = np.sort(_indices(f"{where}: client {k if names is None else names[k]}", part, samples))
        repeated = mine[1:][mine[1:] == mine[:-1]]
        taken = mine[owner[mine] >= 0]
        if repeated.size:
            raise UserError(f"{where}: client {k if names is None else names[k]} has sample {repeated[0]} twice")
        if taken.size:
            both = [str(i if names is None else names[i]) for i in (owner[taken[0]], k)]
            raise UserError(f"{where}: clients {both[0]} and {both[1]} both have sample {taken[0]}")
        owner[mine] = k
        found.append(mine)
    return found


def as_array(where: str, given: Any, of: str) -> np.ndarray:
    """A user's object, which may raise anything, as an array `of` numbers or indices."""
    try:
        return np.asarray(given)
    except Exception as error:
        why = one_line(error, 80) or type(error).__name__
        raise UserError(f"{where}: is not an array of {of} ({why})") from error


def _indices(where: str, part: Any, samples: int) -> np.ndarray:
    array = as_array(where, part, "indices")
    if array.size == 0:
        raise UserError(f"{where}: has no samples")
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise UserError(f"{where}: is {array.dtype} of shape {array.shape}; indices are whole numbers of shape [n]")
    bad = array[(array < 0) | (array >= samples)]
    if bad.size:
        raise UserError(f"{where}: has sample {bad[0]}; the samples are 0 to {samples - 1}")
    return array.astype(np.int64)


def parts_of(where: str, owners: np.ndarray, samples: int, clients: int | None) -> list[np.ndarray]:
    """The parts of clients 0 to N − 1 from the client's number of each sample."""
    if len(owners) != samples:
        raise UserError(f"{where}: has {len(owners)} client numbers for {samples} training samples")
    low, high = int(owners.min()), int(owners.max())
    if low < 0 or high >= samples:
        raise UserError(f"{where}: has client number {low if low < 0 else high}; allowed are 0 to clients - 1")
    ends = np.cumsum(np.bincount(owners.astype(np.int64)))[:-1]
    return check_parts(where, np.split(np.argsort(owners, kind="stable"), ends), samples, clients)


def consecutive(sizes: Sequence[int]) -> list[np.ndarray]:
    """The parts of clients whose samples lie behind one another.

    >>> consecutive([2, 1])
    [array([0, 1]), array([2])]
    """
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def group_by_client(owners: Iterable[Hashable]) -> dict[Any, np.ndarray]:
    """The samples of each client from the client's name at each sample; clients in the order of their first sample."""
    found: dict[Any, list[int]] = {}
    for i, owner in enumerate(owners):
        found.setdefault(owner, []).append(i)
    return {owner: np.array(indices) for owner, indices in found.items()}


def fingerprint(parts: Sequence[np.ndarray]) -> str:
    """12 hex digits of the SHA-256 of a partition; the order of samples within a client does not matter.

    >>> fingerprint([np.array([0, 2]), np.array([1])])
    '5898622a490e'
    """
    digest = hashlib.sha256()
    for part in parts:
        mine = np.sort(np.asarray(part)).astype("<i8")
        digest.update(len(mine).to_bytes(8, "little") + mine.tobytes())
    return digest.hexdigest()[:12]
