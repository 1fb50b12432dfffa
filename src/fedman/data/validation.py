"""A validation part: training samples that no client trains on, by which settings are chosen without the test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedman.data.dataset import Dataset
from fedman.errors import UserError

STREAM = 15  # separates these draws from other uses of the same seed


def held_out(targets: np.ndarray, share: float, seed: int) -> np.ndarray:
    """The indices, ascending, of ⌊share·n⌉ training samples drawn at random.

    Of class labels every class gives its share, to within one sample: each class is put into a random order, and the
    samples that come first relative to the size of their class are taken.
    """
    n = len(targets)
    count = round(share * n)
    if not 0 < count < n:
        raise UserError(f"validation: {share:g} of {n} training samples are {count}; both parts need a sample")
    rng = np.random.default_rng([STREAM, seed])
    order = rng.permutation(n)
    if targets.ndim > 1 or not np.issubdtype(targets.dtype, np.integer):
        return np.sort(order[:count])
    labels = targets[order]
    by_class = np.lexsort([labels])
    sizes = np.bincount(labels)
    first = np.cumsum(sizes) - sizes
    rank = np.empty(n, np.int64)
    rank[by_class] = np.arange(n) - first[labels[by_class]]
    place = (rank + 0.5) / sizes[labels]
    return np.sort(order[np.lexsort([place])[:count]])


def in_place_of_test(data: Dataset, held: np.ndarray) -> Dataset:
    """The data set with the samples held out in the place of its test set, which is then nowhere to be seen."""
    return replace(data, x_test=data.x_train[held], y_test=data.y_train[held], test_parts=None)


def without(parts: Sequence[np.ndarray], held: np.ndarray) -> list[np.ndarray]:
    """The clients' parts without the samples held out; every client must keep one."""
    kept = np.ones(1 + max(int(part.max(initial=-1)) for part in (*parts, held)), bool)
    kept[held] = False
    left = [part[kept[part]] for part in parts]
    if empty := [k for k, part in enumerate(left) if not len(part)]:
        raise UserError(f"validation: client {empty[0]} has no sample left to train on; hold out a smaller share")
    return left
