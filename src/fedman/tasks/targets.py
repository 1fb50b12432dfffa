"""Which task a user's own targets mean, where none is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class Fitting(NamedTuple):
    """The name of the task that targets mean, None where that is not clear; and what their owner can do."""

    task: str | None
    advice: str


def fitting(x: np.ndarray, y: np.ndarray) -> Fitting:
    """The task for these inputs and targets, of dtypes int64 and float32 as a `Dataset` has them.

    >>> import numpy as np
    >>> fitting(np.ones((4, 3)), np.array([0.5, 1.5, 2.5, 3.5])).task
    'regression'
    >>> fitting(np.ones((4, 3)), np.array([0.0, 1.0, 1.0, 0.0])).advice
    'give the classes as whole numbers, y.astype(int), or name task=regression'
    >>> fitting(np.ones((4, 3)), np.eye(4)[[0, 1, 3, 1]]).advice
    'give the classes, y.argmax(1), or name task=multi-label'
    """
    whole = y.dtype.kind in "iu"
    if y.ndim == 1 and not whole and _number_classes(y):
        return Fitting(None, "give the classes as whole numbers, y.astype(int), or name task=regression")
    if y.ndim == 1:
        return _named("classification" if whole else "regression")
    if y.ndim == 2 and y.shape[1] > 1 and ((y == 0) | (y == 1)).all():
        if (y.sum(1) == 1).all():
            return Fitting(None, "give the classes, y.argmax(1), or name task=multi-label")
        if whole and _are_ids(x, y):
            return Fitting(None, "name task=multi-label or task=language-model")
        return _named("multi-label")
    if not whole:
        return _named("regression")
    if y[0].size == 1:
        return Fitting(None, "give the classes, y.ravel()")
    return _named("language-model") if _are_ids(x, y) else Fitting(None, "name a task of your own")


def _named(task: str) -> Fitting:
    return Fitting(task, f"name task={task}")


def _number_classes(y: np.ndarray) -> bool:
    """Whether floating-point numbers are 0, 1, ..., each of them there and on average twice, as labels from a table."""
    if not 1 <= y.max() < len(y) / 2 or (y < 0).any() or (y != y.astype(int)).any():
        return False
    return len({*y.tolist()}) == y.max() + 1


def _are_ids(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether every position has an input that may be an id, and a target."""
    return x.dtype.kind in "iu" and x.shape == y.shape and x.ndim == 2
