"""Data in the forms people have it, as a `Dataset`: arrays, torch Datasets and DataLoaders, Hugging Face datasets.

Other libraries' objects are recognised by what they can do, so that none of these libraries is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from fedman.data.client_indices import group_by_client
from fedman.data.dataset import Dataset, as_numpy, from_arrays
from fedman.data.images import is_deep
from fedman.errors import UserError, describe, nearest, one_line

SAMPLES = "a pair (x, y), a torch Dataset, a DataLoader or a Hugging Face dataset"
ACCEPTED = (
    "a Dataset; arrays (x_train, y_train, x_test, y_test); or (train, test) or {'train': ..., 'test': ...}, each of "
    f"them {SAMPLES}"
)
TRAIN, TEST = ("train",), ("test", "validation", "val")
INPUT_NAMES = ("image", "img", "pixel_values", "input_ids", "inputs", "x", "features")
TARGET_NAMES = ("label", "labels", "target", "targets", "y")

Raw = tuple[Any, Any]
"""Inputs and targets, not yet checked."""


def as_dataset(value: Any, name: str = "custom") -> Dataset:
    """A user's data in any of the forms of `ACCEPTED`. Samples of a torch Dataset are pairs (x, y)."""
    if isinstance(value, Dataset):
        return value
    if isinstance(value, tuple | list) and len(value) == 4:
        x, y, x_test, y_test = value
    else:
        train, test = halves_of(name, value)
        x, y = read_samples(f"{name}: training set", train)
        x_test, y_test = read_samples(f"{name}: test set", test)
    return from_arrays(x, y, x_test, y_test, name)


def from_huggingface(
    data: Any,
    *,
    inputs: str | None = None,
    target: str | None = None,
    client: str | None = None,
    name: str = "custom",
) -> Dataset:
    """A Hugging Face `DatasetDict`, or its (train, test).

    `inputs` and `target` are columns: by default the only one of type Image and the only one of type ClassLabel, or
    those with usual names. `client` is a column that says whose a sample is; clients are then the data's own.
    """
    train, test = halves = halves_of(name, data)
    for half in halves:
        if not is_huggingface(half):
            raise UserError(f"{name}: {type(half).__name__} is not a Hugging Face dataset (features, column_names)")
    x, y = read_samples(f"{name}: training set", train, inputs, target)
    x_test, y_test = read_samples(f"{name}: test set", test, inputs, target)
    if client is None:
        return from_arrays(x, y, x_test, y_test, name)
    parts = group_by_client(_column(f"{name}: training set", train, client))
    own = group_by_client(_column(f"{name}: test set", test, client)) if client in test.column_names else {}
    names = [str(each) for each in parts]
    test_parts = own_test_parts(name, list(parts), own)
    return from_arrays(
        x, y, x_test, y_test, name, parts=list(parts.values()), test_parts=test_parts, client_names=names
    )


def own_test_parts(where: str, clients: list[Any], tests: Mapping[Any, np.ndarray]) -> list[np.ndarray] | None:
    """Each client's test samples in the clients' order; None if the test set is of other clients, or of nobody."""
    if tests.keys().isdisjoint(clients):
        return None
    if strange := sorted(tests.keys() ^ set(clients), key=str):
        odd = strange[0]
        has, lacks = ("training", "test") if odd not in tests else ("test", "training")
        raise UserError(
            f"{where}: client {odd} has {has} samples but no {lacks} samples; either all clients have their own test "
            "samples or none"
        )
    return [tests[client] for client in clients]


def halves_of(name: str, value: Any) -> tuple[Any, Any]:
    """The training and the test set."""
    if isinstance(value, Mapping):
        found = [next((value[key] for key in keys if key in value), None) for keys in (TRAIN, TEST)]
        if any(half is None for half in found):
            raise UserError(f"{name}: has {', '.join(map(str, value)) or 'nothing'}; wanted are train and test")
        return found[0], found[1]
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    count = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    raise UserError(f"{name}: is {type(value).__name__}{count}; wanted is {ACCEPTED}")


def is_huggingface(value: Any) -> bool:
    """Whether `value` has typed columns."""
    return hasattr(value, "features") and hasattr(value, "column_names")


def is_samples(value: Any) -> bool:
    """Whether `value` holds inputs and targets itself: a torch or Hugging Face dataset, a DataLoader, a pair (x, y)."""
    if isinstance(value, tuple):
        return len(value) == 2
    arrays = isinstance(value, list | str | Mapping) or hasattr(value, "dtype") or hasattr(value, "__array__")
    return not arrays and (is_huggingface(value) or hasattr(value, "__getitem__") or hasattr(value, "dataset"))


def read_samples(where: str, value: Any, inputs: str | None = None, target: str | None = None) -> Raw:
    """Inputs and targets of one set, in order. A DataLoader's `dataset` is read, whatever its sampler."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    if hasattr(value, "dataset") and hasattr(value, "batch_size"):
        return read_samples(where, value.dataset, inputs, target)
    if not is_samples(value):
        raise UserError(f"{where} is {type(value).__name__}; wanted is {SAMPLES}")
    if not hasattr(value, "__len__"):
        raise UserError(f"{where}: {type(value).__name__} has no length; samples must be there to be indexed")
    if is_huggingface(value):
        columns = _columns(where, value.features, inputs, target)
        if hasattr(value, "select_columns"):
            value = value.select_columns(list(columns))
        return _read(where, value, lambda row: (row[columns[0]], row[columns[1]]))
    tensors = getattr(value, "tensors", None) if type(value).__module__.startswith("torch.") else None
    if isinstance(tensors, tuple) and len(tensors) == 2:  # a class of one's own may transform what it holds
        return tensors[0], tensors[1]
    return _read(where, value, _pair)


def _pair(item: Any) -> Raw:
    if not isinstance(item, tuple | list) or len(item) != 2:
        count = f" of {len(item)}" if isinstance(item, tuple | list) else ""
        raise UserError(f"is {type(item).__name__}{count}; wanted is a pair (x, y)")
    return item[0], item[1]


def _read(where: str, items: Any, pick: Callable[[Any], Raw]) -> Raw:
    """All samples, stacked: each must have the shape and dtype of the first."""
    n = len(items)
    if n == 0:
        raise UserError(f"{where} has no samples")
    stacked: list[np.ndarray] = []
    for i in range(n):
        try:
            arrays = [_array(each) for each in pick(items[i])]
        except Exception as error:  # a user's dataset may raise anything
            why = str(error) if isinstance(error, UserError) else f"cannot be read ({describe(error)})"
            raise UserError(f"{where}: sample {i} {one_line(why)}") from error
        if not stacked:
            stacked = [np.empty((n, *a.shape), a.dtype) for a in arrays]
        for name, a, all_of in zip(("input", "target"), arrays, stacked, strict=True):
            if (a.shape, a.dtype) != (all_of.shape[1:], all_of.dtype):
                first = f"{all_of.dtype} {all_of.shape[1:]}"
                raise UserError(f"{where}: the {name} of sample {i} is {a.dtype} {a.shape}, that of sample 0 {first}")
            all_of[i] = a
    return stacked[0], stacked[1]


def _array(value: Any) -> np.ndarray:
    """One input or target; pictures become bytes."""
    if hasattr(value, "convert") and hasattr(value, "mode"):  # PIL.Image
        if is_deep(value.mode):  # Pillow makes white of all that is above 255
            raise UserError(f"is a picture of mode {value.mode}, with more than 8 bits a value; give np.asarray of it")
        value = value if value.mode in ("L", "RGB", "RGBA") else value.convert("L" if value.mode == "1" else "RGB")
    array = as_numpy(value)
    if array.dtype.kind not in "biuf":
        raise UserError(f"holds {type(value).__name__}; wanted are numbers (text must be turned into ids first)")
    return array


def _columns(where: str, features: Mapping[str, Any], inputs: str | None, target: str | None) -> tuple[str, str]:
    """The columns of inputs and targets."""
    for key, column in (("inputs", inputs), ("target", target)):
        if column is not None and column not in features:
            raise UserError(f"{where}: no column {column!r} for {key}{nearest(column, features)}")
    target = target or _guess(features, "ClassLabel", TARGET_NAMES, inputs)
    inputs = inputs or _guess(features, "Image", INPUT_NAMES, target)
    if inputs is None and target is not None and len(features) == 2:
        inputs = next(column for column in features if column != target)
    if inputs is None or target is None:
        missing = " and ".join(k for k, column in (("inputs=", inputs), ("target=", target)) if column is None)
        raise UserError(f"{where}: has columns {', '.join(features)}; say which by {missing} of from_huggingface")
    return inputs, target


def _guess(features: Mapping[str, Any], kind: str, names: Iterable[str], other: str | None) -> str | None:
    """The only column of a type; if there is none, the only one with a usual name."""
    free = [column for column in features if column != other]
    typed = [column for column in free if type(features[column]).__name__ == kind]
    found = typed or [column for column in free if column in names]
    return found[0] if len(found) == 1 else None


def _column(where: str, data: Any, column: str) -> list[Any]:
    if column not in data.column_names:
        raise UserError(f"{where}: no column {column!r} for client{nearest(column, data.column_names)}")
    values = [value.item() if hasattr(value, "item") else value for value in data[column]]
    bad = next((i for i, value in enumerate(values) if not isinstance(value, str | int)), None)
    if bad is not None:
        raise UserError(
            f"{where}: {column} of sample {bad} is {type(values[bad]).__name__}; wanted is a word or a number"
        )
    return values
