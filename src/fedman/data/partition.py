"""The partition of training samples over clients: a rule, the data's own clients, a file, or a user's own function.

Rules are `dirX` (Dirichlet), `iid` and `pathC` (C classes per client): pure functions of their arguments that assign
each sample to at most one client. With sigma = 0 clients have ⌊n/N⌋ samples; with sigma > 0 sizes are log-normal and
all samples are used.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedman.data import files, npz
from fedman.data.catalog import PADDING, IidOrder
from fedman.data.client_indices import as_array, check_parts, parts_of
from fedman.data.dataset import Dataset
from fedman.data.rules import FORMATS, RULES, Rule, natural_clients, parse
from fedman.errors import UserError, one_line
from fedman.parts import find

STREAM = 14  # separates these draws from other uses of the same seed
MAX_BYTES = 1 << 30  # of a file that holds a partition

Partition = str | Sequence[Any] | np.ndarray | Callable[[np.ndarray, int, int], Any]
"""A rule or a source by name; index arrays, one for each client; a client number for each sample; or a function
(labels, clients, seed) that returns one of these."""


def clients_of(
    data: Dataset, partition: Partition, clients: int | None = None, *, seed: int = 0, sigma: float = 0.0
) -> list[np.ndarray]:
    """The indices of each client's training samples, int64, ascending.

    `clients`: how many there must be; rules and functions need it. `sigma` is the σ of log-normal sizes of a rule.
    """
    rule = parse(partition) if isinstance(partition, str) else Rule("custom")
    if rule.kind in RULES:
        if clients is None:
            raise UserError(f"clients: partition {partition} needs their number")
        return split(data.y_train, str(partition), clients, classes=data.classes, seed=seed, sigma=sigma, iid=data.iid)
    where = f"partition {partition}" if isinstance(partition, str) else "partition"
    if sigma:
        raise UserError(f"unbalanced: {sigma} is not possible with {where}, which decides the clients' sizes itself")
    if rule.kind == "natural":
        if data.parts is None:
            raise UserError(f"partition: natural is not possible, {data.name} has no clients of its own")
        return _checked(where, data.parts, data, clients)
    if rule.kind == "file":
        return _checked(where, _read(Path(rule.source).expanduser()), data, clients)
    if rule.kind == "module":
        partition = find("partition", rule.source)
        if not callable(partition):
            raise UserError(f"{where}: is {type(partition).__name__}, not a function of labels, clients and seed")
    if isinstance(partition, str):
        raise UserError(f"{where}: was given in Python, as a list or a function; give it again")
    if callable(partition):
        partition = _call(where, partition, data.y_train, clients, seed)
    return _checked(where, partition, data, clients)


def _call(where: str, function: Callable[..., Any], labels: np.ndarray, clients: int | None, seed: int) -> Any:
    """What a user's function returns; it cannot write to the labels."""
    if clients is None:
        raise UserError(f"clients: {where} needs their number")
    labels = labels.view()
    labels.flags.writeable = False
    try:
        return function(labels, clients, seed)
    except UserError:
        raise
    except Exception as error:  # a user's function may raise anything
        why = f"{type(error).__name__}: {error}".split("\n")[0]
        raise UserError(f"{where}: the function raised {why}") from error


def _checked(where: str, given: Any, data: Dataset, clients: int | None) -> list[np.ndarray]:
    """Parts from index arrays, or from the client number of each sample."""
    samples = len(data.y_train)
    if (owners := _owners(where, given)) is not None:
        return parts_of(where, owners, samples, clients)
    return check_parts(where, given, samples, clients, data.client_names if given is data.parts else None)


def _owners(where: str, given: Any) -> np.ndarray | None:
    """The client number of each sample, if that is what was given, as an array or a list."""
    listed = isinstance(given, list | tuple) and given and not hasattr(given[0], "__len__")
    if not listed and not hasattr(given, "dtype"):
        return None
    owners = as_array(where, given, "numbers")
    if owners.ndim == 2:
        return None
    if owners.ndim != 1 or owners.size == 0 or owners.dtype.kind not in "iu":
        raise UserError(
            f"{where}: is {owners.dtype} of shape {owners.shape}; wanted are a client number for each sample, whole "
            "numbers of shape [n], or a list of index arrays"
        )
    return owners


def given_clients(partition: Partition, source: str | Dataset) -> int | None:
    """The number of clients where the partition itself says it: the data's own, or those of a file or a list."""
    rule = parse(partition) if isinstance(partition, str) else Rule("custom")
    if rule.kind == "natural":
        return natural_clients(source)
    given = _read(Path(rule.source).expanduser()) if rule.kind == "file" else partition
    if isinstance(given, str) or not hasattr(given, "__len__"):
        return None
    owners = _owners(f"partition {rule.source}".rstrip(), given)
    return len(given) if owners is None else int(owners.max()) + 1


def _read(path: Path) -> Any:
    """What a file holds: .npy or .npz (an array `clients`) with a client number for each sample; .json with the same,
    or with lists of indices."""
    try:
        if path.suffix == ".json":
            return json.loads(files.read_plain(path, MAX_BYTES))
        if path.suffix == ".npz":
            return npz.read_arrays(path, ("clients",))[1][0]
        if path.suffix == ".npy":
            files.check_regular(path)
            return np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise UserError(f"partition: {path} cannot be read ({error.strerror or error})") from error
    except (*npz.BAD_HEADER, OverflowError) as error:
        raise UserError(f"partition: {path} is not a whole {path.suffix} file ({one_line(error, 80)})") from error
    raise UserError(f"partition: {path} must end in {', '.join(FORMATS)}")


def split(
    labels: np.ndarray,
    spec: str,
    clients: int,
    *,
    classes: int,
    seed: int = 0,
    sigma: float = 0.0,
    iid: IidOrder = "shuffled",
) -> list[np.ndarray]:
    """The sample indices of each client, int64, ascending.

    `sigma` is the σ of log-normal client sizes (0: all equal); `iid` the order that the partition `iid` cuts.
    """
    kind, value, _ = parse(spec)
    if kind not in RULES:
        raise UserError(f"partition: {spec} is no rule that splits labels")
    if kind != "iid" and (labels.ndim != 1 or labels.dtype.kind not in "iu"):
        raise UserError(
            f"partition: {spec} needs class labels, but targets are {labels.dtype} of shape {labels.shape}; "
            "possible are iid, natural, file:PATH and module:function"
        )
    if not 1 <= clients <= len(labels):
        raise UserError(f"clients: {clients} is not allowed; each needs a sample, so 1 to {len(labels)} are possible")
    if not 0 <= sigma <= 10:
        raise UserError(f"sigma: {sigma} is not allowed; allowed are 0 (equal sizes) to 10")
    rng = np.random.default_rng([STREAM, seed])
    n = len(labels)
    sizes = _share(n, rng.lognormal(np.log(n / clients), sigma, clients)) if sigma else np.full(clients, n // clients)
    parts: Sequence[np.ndarray | list[int]]
    if kind == "dir":
        parts = _dirichlet(labels, sizes, classes, value, rng)
    elif kind == "path":
        parts = _pathological(labels, sizes, classes, int(value), rng)
    else:
        order = _iid_order(labels, iid, rng)
        parts = np.split(order[: sizes.sum()], np.cumsum(sizes)[:-1])
    return [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]


def _share(n: int, weights: np.ndarray) -> np.ndarray:
    """Split n into whole parts proportional to `weights`, none of them 0.

    Parts are truncated, the rounding difference goes to the first part that stays positive, and empty parts then get
    one from the largest.
    """
    sizes = (weights / weights.sum() * n).astype(np.int64)
    rest = n - sizes.sum()
    sizes[np.flatnonzero(sizes + rest > 0)[0]] += rest
    for empty in np.flatnonzero(sizes == 0):
        sizes[sizes.argmax()] -= 1
        sizes[empty] = 1
    return sizes


def _pools(labels: np.ndarray, classes: int) -> list[np.ndarray]:
    """The indices of each class, ascending."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels, minlength=classes))[:-1])


def _dirichlet(
    labels: np.ndarray, sizes: np.ndarray, classes: int, delta: float, rng: np.random.Generator
) -> list[list[int]]:
    """FedDyn's procedure: π_k ~ Dirichlet(δ); clients that are not full take turns at random, each drawing a
    class from π_k and taking the last sample of that class's pool.

    Where FedDyn redraws until it finds a class that is not empty, empty classes are removed from π_k here, which gives
    the same distribution without rejected draws. A client with no mass left draws uniformly.
    """
    pools = [pool.tolist() for pool in _pools(labels, classes)]
    prior = rng.dirichlet(np.full(classes, delta), len(sizes))
    left = np.array([bool(pool) for pool in pools])
    cdf: dict[int, list[float]] = {}  # of clients that have drawn since a class was emptied
    parts: list[list[int]] = [[] for _ in sizes]
    room, waiting = sizes.tolist(), list(range(len(sizes)))
    for turn, draw in rng.random((int(sizes.sum()), 2)).tolist():
        place = int(turn * len(waiting))
        k = waiting[place]
        if k not in cdf:
            cdf[k] = _cdf(prior[k], left)
        c = bisect_right(cdf[k], draw)
        parts[k].append(pools[c].pop())
        if len(parts[k]) == room[k]:
            waiting.pop(place)
        if not pools[c]:
            left[c] = False
            cdf.clear()
    return parts


def _cdf(prior: np.ndarray, left: np.ndarray) -> list[float]:
    """Cumulative π_k over the classes that are left; the last entry is exactly 1."""
    mass = prior * left
    cumulative = (mass if mass.any() else left.astype(float)).cumsum()
    return (cumulative / cumulative[-1]).tolist()


def _iid_order(labels: np.ndarray, order: IidOrder, rng: np.random.Generator) -> np.ndarray:
    """The order of which iid clients are consecutive blocks."""
    if order == "balanced":
        pools = _pools(labels, int(labels.max()) + 1)
        rank = np.concatenate([np.arange(len(pool)) for pool in pools])
        return np.concatenate(pools)[np.argsort(rank, kind="stable")]
    return np.arange(len(labels)) if order == "stored" else rng.permutation(len(labels))


def _pathological(
    labels: np.ndarray, sizes: np.ndarray, classes: int, per_client: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Shards of one class each; every client gets `per_client` of them, all of different classes.

    The number of shards of a class is proportional to its share of the data, and all samples are used. Client sizes
    are exact if classes divide evenly; otherwise the number of classes per client is exact and sizes are approximate.
    """
    pools = _pools(labels, classes)
    counts = np.array([len(pool) for pool in pools])
    shards = _shards(counts, len(sizes), per_client)
    has = np.zeros((len(sizes), classes))
    for k in rng.permutation(len(sizes)):
        # classes with most shards left first, ties at random: this never runs out of distinct classes
        chosen = np.lexsort((rng.random(classes), -shards))[:per_client]
        shards[chosen] -= 1
        has[k, chosen] = 1
    weights = _fit(has, sizes, counts)
    parts: list[list[np.ndarray]] = [[] for _ in sizes]
    for c in np.flatnonzero(counts):
        clients = np.flatnonzero(has[:, c])
        share = np.cumsum(weights[clients, c])
        spare = counts[c] - len(clients)  # beyond the one sample that each shard has at least
        cuts = np.arange(1, len(clients) + 1) + np.rint(share / share[-1] * spare).astype(int)
        for k, shard in zip(clients, np.split(rng.permutation(pools[c]), cuts[:-1]), strict=True):
            parts[k].append(shard)
    return [np.concatenate(part) for part in parts]


def _fit(has: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Scale a 0/1 table towards these row and column sums (iterative proportional fitting), columns last."""
    fitted = has.copy()
    for _ in range(100):
        fitted *= (rows / fitted.sum(1))[:, None]
        fitted *= columns / np.maximum(fitted.sum(0), 1e-300)
    return fitted


def _shards(counts: np.ndarray, clients: int, per_client: int) -> np.ndarray:
    """The number of shards of each class: clients·per_client in all, for a class at most one per client and one
    per sample, each further shard given to the class whose shards are largest."""
    present, total = int((counts > 0).sum()), clients * per_client
    cap = np.minimum(counts, clients)
    if per_client > present or total < present or total > cap.sum():
        raise UserError(
            f"partition: path{per_client} with {clients} clients is not possible for {present} classes of "
            f"{counts[counts > 0].min()} to {counts.max()} samples; each client needs {per_client} "
            f"different classes and a sample of each, each class a client (clients >= {-(-present // per_client)})"
        )
    shards = np.minimum(counts, 1)
    while shards.sum() < total:
        shards[np.argmax(np.where(shards < cap, counts / np.maximum(shards, 1), -1))] += 1
    return shards


def table(labels: np.ndarray, parts: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """Samples of each class at each client, int64 [clients, classes]; of targets that are ids, positions of each id."""
    if labels.dtype.kind == "f":
        raise UserError(f"partition: targets are {labels.dtype}, so there are no classes to count")
    each = (labels[part].ravel() for part in parts)
    return np.stack([np.bincount(mine[mine != PADDING], minlength=classes) for mine in each])


def heterogeneity(labels: np.ndarray, parts: Sequence[np.ndarray], classes: int) -> dict[str, float]:
    """How far clients are from iid, and their sizes: means over clients of the number of classes present and of the
    labels' perplexity exp(−Σ p ln p), the number of classes of a uniform distribution with the same entropy. Targets
    that are not whole numbers have only sizes."""
    sizes = [len(part) for part in parts]
    facts: dict[str, float] = {"clients": len(parts), "smallest": min(sizes), "largest": max(sizes)}
    if labels.dtype.kind == "f":
        return facts
    counts = table(labels, parts, classes)
    p = counts / counts.sum(1, keepdims=True)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
    classes_each = {"classes": float((counts > 0).sum(1).mean()), "perplexity": float(np.exp(entropy).mean())}
    return {"clients": len(parts), **classes_each, **facts}
