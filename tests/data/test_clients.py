"""Data as clients hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedman import data
from fedman.data import partition
from fedman.errors import UserError

RNG = np.random.default_rng(0)


def samples(n: int, features: int = 3) -> tuple[np.ndarray, np.ndarray]:
    return RNG.normal(size=(n, features)).astype(np.float32), np.arange(n) % 2


def dataset(n: int) -> TensorDataset:
    x, y = samples(n)
    return TensorDataset(torch.tensor(x), torch.tensor(y))


ANN, BOB, EVE = samples(4), samples(2), samples(3)


def test_clients_with_a_common_test_set() -> None:
    own = data.from_clients([ANN, BOB], test=EVE, name="mine")
    assert (own.name, own.client_names, own.test_parts, own.classes) == ("mine", None, None, 2)
    for part, (x, y) in zip(partition.clients_of(own, "natural", 2), (ANN, BOB), strict=True):
        np.testing.assert_array_equal(own.x_train[part], x)
        np.testing.assert_array_equal(own.y_train[part], y)
    np.testing.assert_array_equal(own.x_test, EVE[0])


def test_clients_with_their_own_test_sets() -> None:
    """Arrays, tensors, lists, torch Datasets and pairs of them."""
    made, tested = dataset(5), dataset(2)
    own = data.from_clients(
        {
            "arrays": (*ANN, *BOB),
            "lists": [each.tolist() for each in (*BOB, *EVE)],
            "datasets": (made, tested),
            "pairs": (EVE, ANN),
            "by name": {"train": BOB, "test": tested},
        }
    )
    assert own.client_names == ["arrays", "lists", "datasets", "pairs", "by name"]
    assert [len(part) for part in own.parts] == [4, 2, 5, 3, 2]
    assert [len(part) for part in own.test_parts] == [2, 3, 2, 4, 2]
    np.testing.assert_array_equal(own.x_train[own.parts[2]], made.tensors[0].numpy())
    np.testing.assert_array_equal(own.x_test[own.test_parts[2]], tested.tensors[0].numpy())
    np.testing.assert_allclose(own.x_train[own.parts[1]], BOB[0])


def test_torch_datasets_with_a_common_test_set() -> None:
    own = data.from_clients([dataset(3), dataset(4)], test=dataset(5), names=["a", "b"])
    assert ([len(part) for part in own.parts], len(own.y_test), own.client_names) == ([3, 4], 5, ["a", "b"])


def test_slices_of_one_array_are_clients_if_they_do_not_overlap() -> None:
    x, y = samples(10)
    own = data.from_clients([(x[:4], y[:4]), (x[4:], y[4:])], test=(x, y))
    assert [len(part) for part in own.parts] == [4, 6]
    data.from_clients([(x[::2], y[::2]), (x[1::2], y[1::2])], test=(x, y))


class Frame:
    """What pandas' tables can do: they are arrays, and their columns are found by name."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, *arguments: object, **more: object) -> np.ndarray:
        return self.values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, column: str) -> np.ndarray:
        raise KeyError(column)


def test_tables_are_arrays() -> None:
    own = data.from_clients({"ann": (Frame(ANN[0]), ANN[1])}, test=(Frame(BOB[0]), BOB[1]))
    np.testing.assert_array_equal(own.x_train, ANN[0])


def test_a_class_that_only_one_client_has_counts() -> None:
    own = data.from_clients([ANN, (EVE[0], [0, 1, 6])], test=BOB)
    assert own.classes == 7


def test_pictures_of_clients_are_normalised_together() -> None:
    dark, light = np.zeros((3, 4, 4), np.uint8), np.full((1, 4, 4), 255, np.uint8)
    own = data.from_clients([(dark, [0, 1, 0]), (light, [1])], test=(light, [1]))
    assert own.mean == (0.25,)
    assert own.shape == (1, 4, 4)


X, Y = samples(10)
TENSOR = torch.tensor(X)
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "nobody": ([], {}, "clients is list; wanted is a list or mapping with one or more"),
    "nobody by name": ({}, {}, "wanted is a list or mapping"),
    "a number": (3, {}, "clients is int"),
    "a word": ("ab", {}, "clients is str"),
    "no test set": ([ANN, BOB], {}, "client 0 has no test samples; give each client its own, or test=(x, y)"),
    "one without a test set": ({"ann": (*ANN, *BOB), "bob": BOB}, {}, "client bob has no test samples"),
    "two test sets": ([(*ANN, *BOB)], {"test": EVE}, "client 0 has test samples of its own; test= is for"),
    "three arrays": ([ANN, (*BOB, EVE[0])], {"test": EVE}, "client 1 is tuple of 3; wanted are (x, y), (x, y, x_test"),
    "a client that is a number": ([ANN, 3], {"test": EVE}, "client 1 is int; wanted is"),
    "a name of two lines": ({"a\nb": ANN}, {"test": EVE}, "names has 'a\\nb', which is no name"),
    "a client by other names": ([{"x": X, "y": Y}], {}, "client 0: has x, y; wanted are train and test"),
    "a client that is an array": ([ANN, X], {"test": EVE}, "client 1 is ndarray; wanted is"),
    "no samples": ([ANN, (X[:0], Y[:0])], {"test": EVE}, "client 1: x is empty (shape (0, 3))"),
    "no test samples": ([(*ANN, X[:0], Y[:0])], {}, "client 0: x_test is empty"),
    "ragged": ([ANN, ([[1, 2, 3], [4]], [0, 1])], {"test": EVE}, "client 1: x is not an array of numbers"),
    "a label less": ([ANN, (X, Y[:9])], {"test": EVE}, "client 1: x has 10 samples but y has 9 labels"),
    "another shape": ({"ann": ANN, "bob": samples(3, 4)}, {"test": EVE}, "client bob: x and that of the first client"),
    "another kind": ([ANN, ((X * 9).astype(int), Y)], {"test": EVE}, "client 1: x and that of the first client must"),
    "other targets": ([ANN, (X, Y / 2)], {"test": EVE}, "client 1: y and that of the first client must hold targets"),
    "another test shape": ([(*ANN, *samples(3, 4))], {}, "x_train and x_test must hold samples of one kind"),
    "not finite": ([ANN, (X * np.nan, Y)], {"test": EVE}, "client 1: x has a value that is not finite"),
    "negative labels": ([ANN, (X, Y - 1)], {"test": EVE}, "client 1: y has labels -1 to 0"),
    "the same client twice": ([ANN] * 2, {"test": EVE}, "client 1 and client 0 overlap: their x are the same memory"),
    "overlapping slices": ([(X[:6], Y[:6]), (X[5:], Y[5:])], {"test": EVE}, "client 1 and client 0 overlap"),
    "overlapping tensors": ([(TENSOR[:6], Y[:6]), (TENSOR[5:], Y[5:])], {"test": EVE}, "client 1 and client 0 overlap"),
    "a name less": ([ANN, BOB], {"test": EVE, "names": ["ann"]}, "has 1 names for 2 clients"),
    "a name twice": ([ANN, BOB], {"test": EVE, "names": ["ann", "ann"]}, "names has 'ann', which is no name or was"),
    "a name that is none": ([ANN, BOB], {"test": EVE, "names": ["ann", 3]}, "names has 3, which is no name"),
    "names twice": ({"ann": ANN}, {"test": EVE, "names": ["ann"]}, "names are given twice"),
    "a test set that is a number": ([ANN], {"test": 3}, "test set is int; wanted is"),
    "one class": ([(X, Y * 0)], {"test": (X, Y * 0)}, "at least two classes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_clients(case: str) -> None:
    clients, arguments, says = BAD[case]
    with pytest.raises(UserError, match=r"^custom: ") as error:
        data.from_clients(clients, **arguments)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
