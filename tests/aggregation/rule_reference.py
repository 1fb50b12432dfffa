"""The rules as slow, obvious loops: one coordinate, one client at a time, weights as exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np


def mean(upload, share, theta):
    return {name: np.average(v, axis=0, weights=share) for name, v in upload.items()}


def coordinatewise(of):
    """A rule from a function of the sorted pairs (value, exact share) of one coordinate."""

    def rule(upload, share, theta, **hyper):
        weights = [Fraction(s).limit_denominator(10_000) for s in share]  # sizes over their mean
        return {
            name: np.array([of(sorted(zip(column, weights, strict=True)), **hyper) for column in v.T])
            for name, v in upload.items()
        }

    return rule


def middle(pairs):
    """The midpoint of all x that minimise Σ share·|x − value|; one of the values always does."""
    cost = {x: sum(s * abs(Fraction(v) - Fraction(x)) for v, s in pairs) for x, _ in pairs}
    best = [x for x in cost if cost[x] == min(cost.values())]
    return (min(best) + max(best)) / 2


def trimmed(pairs, trim=0.2):
    outer, whole = Fraction(str(trim)) * sum(s for _, s in pairs), sum(s for _, s in pairs)
    kept, below = [], Fraction(0)
    for value, share in pairs:
        if below >= outer and below + share <= whole - outer:
            kept.append((value, share))
        below += share
    if not kept:
        return middle(pairs)
    return float(sum(Fraction(v) * s for v, s in kept) / sum(s for _, s in kept))


def chosen(w, hostile, count):
    """The clients with the lowest Krum scores."""
    clients = len(w)
    scores = []
    for i in range(clients):
        others = sorted(sum((a - b) ** 2 for a, b in zip(w[i], w[j], strict=True)) for j in range(clients) if j != i)
        scores.append((sum(others[: max(1, clients - hostile - 2)]), i))
    return sorted(i for _, i in sorted(scores)[:count])


def krum(upload, share, theta, assumed_attackers=0.2):
    hostile = math.ceil(Fraction(str(assumed_attackers)) * len(share))
    (best,) = chosen(upload["w"], hostile, 1)
    return {name: v[best] for name, v in upload.items()}


def multi_krum(upload, share, theta, assumed_attackers=0.2):
    hostile = math.ceil(Fraction(str(assumed_attackers)) * len(share))
    best = chosen(upload["w"], hostile, max(1, len(share) - hostile))
    return {name: np.average(v[best], axis=0, weights=share[best]) for name, v in upload.items()}


def norm_clip(upload, share, theta, clip_multiple=1.0):
    far = [math.dist(row, theta) for row in upload["w"]]
    bound = clip_multiple * sorted(far)[(len(far) - 1) // 2]
    scale = [min(1.0, bound / d) if d else 1.0 for d in far]
    counted = {name: np.array([s * row for s, row in zip(scale, v, strict=True)]) for name, v in upload.items()}
    counted["w"] = np.array([theta + s * (row - theta) for s, row in zip(scale, upload["w"], strict=True)])
    return mean(counted, share, theta)


RULES = {
    "mean": mean,
    "median": coordinatewise(middle),
    "trimmed-mean": coordinatewise(trimmed),
    "krum": krum,
    "multi-krum": multi_krum,
    "norm-clip": norm_clip,
}
