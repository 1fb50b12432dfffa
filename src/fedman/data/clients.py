"""`from_clients`: data as clients hold them, each with samples of their own, and test samples if they have any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fedman.data.client_indices import consecutive
from fedman.data.convert import halves_of, is_samples, read_samples
from fedman.data.dataset import Dataset, as_numpy, check_kind, check_samples, from_arrays
from fedman.errors import UserError

Pair = tuple[np.ndarray, np.ndarray]


def from_clients(
    clients: Sequence[Any] | Mapping[str, Any],
    *,
    test: Any = None,
    names: Sequence[str] | None = None,
    name: str = "custom",
) -> Dataset:
    """A data set whose clients are given, for the partition `natural`.

    A client is (x, y); (x, y, x_test, y_test); a torch Dataset; or (train, test), or {"train": ..., "test": ...}, of
    Datasets or of pairs (x, y). Either each has its own test samples, or `test` is a set (x, y) that all share. A
    mapping says the clients' names.

    >>> data = from_clients({"ann": ([[0.0], [1.0]], [0, 1]), "bob": ([[2.0]], [1])}, test=([[3.0]], [1]))
    >>> [part.tolist() for part in data.parts], data.client_names
    ([[0, 1], [2]], ['ann', 'bob'])
    """
    if isinstance(clients, Mapping):
        if names is not None:
            raise UserError(f"{name}: names are given twice, as names= and as the clients' keys")
        names, clients = [str(key) for key in clients], list(clients.values())
    if not isinstance(clients, Sequence) or isinstance(clients, str) or len(clients) == 0:
        raise UserError(f"{name}: clients is {type(clients).__name__}; wanted is a list or mapping with one or more")
    called = _names(name, names, len(clients))
    train, own_test = [], []
    for each, who in zip(clients, called, strict=True):
        where = f"{name}: client {who}"
        ours, theirs = _client(where, each)
        train.append((where, *ours))
        if theirs is not None:
            own_test.append((where, *theirs))
    return _together(name, train, own_test, test, list(names) if names is not None else None)


def _together(name: str, train: list[Any], own_test: list[Any], test: Any, names: list[str] | None) -> Dataset:
    """All clients' samples behind one another."""
    if test is not None and own_test:
        raise UserError(f"{own_test[0][0]} has test samples of its own; test= is for clients that have none")
    if test is None and len(own_test) < len(train):
        having = {where for where, *_ in own_test}
        missing = next(where for where, *_ in train if where not in having)
        raise UserError(f"{missing} has no test samples; give each client its own, or test=(x, y)")
    x, y, parts = _joined(train, ("x", "y"))
    _check_disjoint([(where, given) for where, given, _ in train])
    if own_test:
        x_test, y_test, test_parts = _joined(own_test, ("x_test", "y_test"))
        return from_arrays(x, y, x_test, y_test, name, parts=parts, test_parts=test_parts, client_names=names)
    x_test, y_test = read_samples(f"{name}: test set", test)
    return from_arrays(x, y, x_test, y_test, name, parts=parts, client_names=names)


def _names(name: str, names: Sequence[str] | None, count: int) -> list[str]:
    if names is None:
        return [str(k) for k in range(count)]
    if isinstance(names, str) or len(names) != count:
        raise UserError(f"{name}: has {len(names)} names for {count} clients")
    seen: set[str] = set()
    for each in names:
        if not isinstance(each, str) or not each.isprintable() or each in seen:
            raise UserError(f"{name}: names has {each!r:.60}, which is no name or was there before")
        seen.add(each)
    return list(names)


def _client(where: str, value: Any) -> tuple[tuple[Any, Any], tuple[Any, Any] | None]:
    """Training and test samples as they were given."""
    if isinstance(value, tuple | list) and len(value) == 4:
        return (value[0], value[1]), (value[2], value[3])
    if isinstance(value, Mapping) or (isinstance(value, tuple | list) and len(value) == 2 and is_samples(value[0])):
        value = halves_of(where, value)
        return read_samples(f"{where}: training set", value[0]), read_samples(f"{where}: test set", value[1])
    if isinstance(value, tuple | list) and len(value) != 2:
        raise UserError(
            f"{where} is {type(value).__name__} of {len(value)}; wanted are (x, y), (x, y, x_test, y_test), a torch "
            "Dataset, or (train, test)"
        )
    return read_samples(where, value), None


def _joined(
    given: list[tuple[str, Any, Any]], fields: tuple[str, str]
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """The samples of all clients, of one kind, and which are whose."""
    checked: list[Pair] = []
    for where, x, y in given:
        checked.append(check_samples(where, fields, x, y))
        for field, what, ours, first in zip(fields, ("samples", "targets"), checked[-1], checked[0], strict=True):
            check_kind(where, (field, "that of the first client"), what, ours, first)
    parts = consecutive([len(y) for _, y in checked])
    return np.concatenate([x for x, _ in checked]), np.concatenate([y for _, y in checked]), parts


def _check_disjoint(given: list[tuple[str, Any]]) -> None:
    """Refuse clients whose arrays share memory: slices of one array that overlap, or one array given twice."""
    blocks = []
    for where, x in given:
        array = x if isinstance(x, np.ndarray) else as_numpy(x) if hasattr(x, "detach") else None
        if array is not None and array.size and array.flags.c_contiguous:
            blocks.append((*np.lib.array_utils.byte_bounds(array), where))
    blocks.sort()
    for (_, end, first), (start, _, second) in pairwise(blocks):
        if start < end:
            raise UserError(f"{second} and {first.split(': ', 1)[1]} overlap: their x are the same memory")
