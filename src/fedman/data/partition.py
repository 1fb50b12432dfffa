"""The partition of training samples over clients: `dirX` (Dirichlet), `iid`, `pathC` (C classes per client).

Every rule is a pure function of its arguments and assigns each sample to at most one client. With sigma = 0
clients have ⌊n/N⌋ samples; with sigma > 0 sizes are log-normal and all samples are used.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from fedman.data.catalog import IidOrder
from fedman.data.dataset import Dataset
from fedman.errors import UserError

STREAM = 14  # separates these draws from other uses of the same seed
_RULE = re.compile(r"(iid)|(dir)(\d+\.?\d*|\.\d+)|(path)(\d+)", re.ASCII)


def parse(spec: str) -> tuple[str, float]:
    """A rule's kind and number: δ of "dir", classes per client of "path", 0 for "iid".

    >>> parse("dir0.3")
    ('dir', 0.3)
    """
    match = _RULE.fullmatch(spec)
    kind, *number = filter(None, match.groups()) if match else ("",)
    value = float(number[0]) if number else 0.0
    if kind != "iid" and not 0 < value <= 1e6:
        raise UserError(
            f"partition: {spec!r} is not allowed; allowed are iid, dirX (Dirichlet, 0 < X <= 1e6: dir0.3) "
            "and pathC (C >= 1 classes per client: path2)"
        )
    return kind, value


def clients_of(data: Dataset, partition: str, clients: int, *, seed: int = 0, sigma: float = 0.0) -> list[np.ndarray]:
    """The indices of each client's training samples: `split` for a data set."""
    return split(data.y_train, partition, clients, classes=data.classes, seed=seed, sigma=sigma, iid=data.iid)


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
    kind, value = parse(spec)
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
    cdf = _cdf(prior, left)
    parts: list[list[int]] = [[] for _ in sizes]
    room, waiting = sizes.tolist(), list(range(len(sizes)))
    for turn, draw in rng.random((int(sizes.sum()), 2)).tolist():
        place = int(turn * len(waiting))
        k = waiting[place]
        c = bisect_right(cdf[k], draw)
        parts[k].append(pools[c].pop())
        if len(parts[k]) == room[k]:
            waiting.pop(place)
        if not pools[c]:
            left[c] = False
            cdf = _cdf(prior, left) if left.any() else cdf
    return parts


def _cdf(prior: np.ndarray, left: np.ndarray) -> list[list[float]]:
    """Cumulative π_k over the classes that are left; the last entry is exactly 1."""
    mass = prior * left
    mass[mass.sum(1) == 0] = left
    cumulative = mass.cumsum(1)
    return (cumulative / cumulative[:, -1:]).tolist()


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
            f"different classes, each class a client (clients >= {-(-present // per_client)})"
        )
    shards = np.minimum(counts, 1)
    while shards.sum() < total:
        shards[np.argmax(np.where(shards < cap, counts / np.maximum(shards, 1), -1))] += 1
    return shards


def table(labels: np.ndarray, parts: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """Samples of each class at each client, int64 [clients, classes]."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


def heterogeneity(labels: np.ndarray, parts: Sequence[np.ndarray], classes: int) -> dict[str, float]:
    """How far clients are from iid, and their sizes: means over clients of the number of classes present and of the
    labels' perplexity exp(−Σ p ln p), the number of classes of a uniform distribution with the same entropy."""
    counts = table(labels, parts, classes)
    sizes = counts.sum(1)
    p = counts / sizes[:, None]
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
    return {
        "clients": len(counts),
        "classes": float((counts > 0).sum(1).mean()),
        "perplexity": float(np.exp(entropy).mean()),
        "smallest": int(sizes.min()),
        "largest": int(sizes.max()),
    }
