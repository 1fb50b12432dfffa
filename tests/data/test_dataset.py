"""Loading by name, and a user's own arrays."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fedman import data
from fedman.errors import UserError
from fedman.tasks import Classification


@pytest.mark.parametrize(
    ("name", "mentions"),
    [
        ("cifar10", ["cifar-10-binary.tar.gz", "cifar-10-batches-bin/", "cifar-10-python.tar.gz"]),
        ("cifar100", ["cifar-100-binary.tar.gz", "cifar-100-binary/", "cifar-100-python/"]),
        ("tiny-imagenet", ["tiny-imagenet-200.zip", "tiny-imagenet-200/"]),
        ("mnist", ["train-images-idx3-ubyte[.gz]", "t10k-labels-idx1-ubyte[.gz]", "MNIST/raw/"]),
        ("fashion-mnist", ["FashionMNIST/raw/"]),
    ],
)
def test_missing_data_says_where_what_and_how(tmp_path: Path, name: str, mentions: list[str]) -> None:
    (tmp_path / "a file").touch()
    for root in (tmp_path, tmp_path / "not there", tmp_path / "a file"):
        with pytest.raises(UserError) as error:
            data.load(name, root)
        message = str(error.value)
        assert "\n" not in message
        for mention in (*mentions, str(root), f"`fedman data get {name}`"):
            assert mention in message


# --- a user's own arrays -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "stored", "seen"),
    [
        ((9, 6, 5), (9, 6, 5, 1), (1, 6, 5)),
        ((9, 6, 5, 3), (9, 6, 5, 3), (3, 6, 5)),
        ((9, 3, 6, 5), (9, 6, 5, 3), (3, 6, 5)),
    ],
)
def test_pixels_of_the_user(given: tuple[int, ...], stored: tuple[int, ...], seen: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).integers(0, 256, given, dtype=np.uint8)
    own = data.from_arrays(x, np.arange(9) % 3, x, np.arange(9) % 3)
    assert own.x_train.shape == stored
    assert own.shape == seen
    channels = own.x_train.reshape(-1, stored[-1]) / 255
    np.testing.assert_allclose(own.mean, channels.mean(0))
    np.testing.assert_allclose(own.std, channels.std(0))


def test_channels_first_pixels_keep_their_values() -> None:
    x = np.random.default_rng(1).integers(0, 256, (9, 3, 6, 5), dtype=np.uint8)
    own = data.from_arrays(x, np.arange(9) % 3, x, np.arange(9) % 3)
    np.testing.assert_array_equal(own.x_train[4, :, :, 2], x[4, 2])


def test_constant_channels_do_not_divide_by_zero() -> None:
    black = np.zeros((4, 2, 2), dtype=np.uint8)
    assert data.from_arrays(black, [0, 1, 0, 1], black, [0, 1, 0, 1]).std == (1.0,)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.uint8, bool])
def test_numbers_of_the_user(dtype: type) -> None:
    x = np.arange(12).reshape(4, 3).astype(dtype)
    own = data.from_arrays(x, np.array([0, 1, 2, 0], np.uint8), x, [1, 1, 1, 4])
    np.testing.assert_array_equal(own.x_test, x.astype(np.float32))
    assert own.classes == 5
    assert own.x_test.dtype == (np.int64 if dtype in (np.int32, np.uint8) else np.float32)


@pytest.mark.parametrize(
    ("y", "stored", "classes"),
    [
        (np.array([0, 2, 1, 0], np.uint8), np.int64, 3),
        ([False, True, False, True], np.int64, 2),
        ([[0, 1, -1], [5, 1, 1], [0, 0, 0], [-1, -1, -1]], np.int64, 12),
        ([[0, 1], [1, 1], [0, 0], [1, 0]], np.int64, 2),
        ([0.5, 1, 2, 3], np.float32, 0),
        (np.ones((4, 2), np.float64), np.float32, 0),
    ],
)
def test_targets_of_the_user(y: object, stored: type, classes: int) -> None:
    """Class labels, ids (the vocabulary is that of inputs of the same shape too), truth values, numbers."""
    x = np.arange(12, dtype=np.int16).reshape(4, 3)
    own = data.from_arrays(x, y, x, y)
    np.testing.assert_array_equal(own.y_train, np.asarray(y))
    assert (own.y_train.dtype, own.classes, own.x_train.dtype) == (stored, classes, np.int64)


def test_words_are_told_how_to_number_them() -> None:
    x, words = np.ones((4, 3)), np.array(["cat", "dog", "cat", "eel"])
    with pytest.raises(UserError, match=re.escape("(words are numbered by np.unique(words, return_inverse=True)[1])")):
        data.from_arrays(x, words, x, words)
    numbers = np.unique(words, return_inverse=True)[1]
    assert data.from_arrays(x, numbers, x, numbers).y_train.tolist() == [0, 1, 0, 2]


def test_masked_values_are_no_numbers() -> None:
    """What is behind the mask is not meant to be used."""
    x = np.ma.masked_greater(np.arange(12.0).reshape(4, 3), 10)
    y = [0, 1, 0, 1]
    with pytest.raises(UserError, match="custom: x_train has masked values; fill them"):
        data.from_arrays(x, y, x, y)
    assert data.from_arrays(x[:3], y[:3], x[:3], y[:3]).x_train.dtype == np.float32  # nothing is masked there


@pytest.mark.parametrize(
    ("y", "says"),
    [
        ([-5, 3, 4, 1], "has labels -5 to 4; allowed are 0 to 262143 (numbers to regress on are floating-point)"),
        ([[1, 2, -100]] * 4, "has labels -100 to 2; allowed are -1 to 262143 (-1 is what does not count)"),
    ],
)
def test_targets_that_are_no_labels(y: list, says: str) -> None:
    x = np.ones((4, 3), int)
    with pytest.raises(UserError, match=re.escape(f"custom: y_train {says}")):
        data.from_arrays(x, y, x, y)


def test_labels_from_1_are_told_of_class_0() -> None:
    x = np.ones((4, 3))
    with pytest.warns(UserWarning, match=r"^custom: no training sample is of class 0; the classes are 0 to 3$"):
        assert data.from_arrays(x, [1, 2, 3, 1], x, [1, 2, 3, 1]).classes == 4


def test_what_a_task_refuses_is_no_matter_of_the_reader() -> None:
    x = np.ones((4, 3))
    for y in (np.ones(4), np.eye(4, dtype=int)):
        with pytest.raises(UserError, match="classification needs a whole number, the class"):
            Classification().check(data.from_arrays(x, y, x, y), (4, 10))


X, Y = np.ones((4, 3)), np.array([0, 1, 1, 0])


def test_clients_of_the_data_itself() -> None:
    own = data.from_arrays(X, Y, X, Y, parts=[[2, 0], [1]], test_parts=[[3], [1, 0]], client_names=["a", "b"])
    assert [part.tolist() for part in own.parts] == [[0, 2], [1]]
    assert [part.tolist() for part in own.test_parts] == [[3], [0, 1]]
    assert data.natural_clients(own) == 2
    assert repr(own) == "Dataset('custom', 4 + 4 samples of (3,) of 2 clients)"
    assert data.natural_clients(data.from_arrays(X, Y, X, Y)) is None
    assert data.natural_clients("digits") is data.natural_clients("npz:nowhere.npz") is None


BAD_PARTS = {
    "of a number": ({"parts": 3}, "parts: is int; wanted is a list of index arrays"),
    "none": ({"parts": []}, "parts: has no parts"),
    "empty": ({"parts": [[0], []]}, "parts: client 1: has no samples"),
    "out of range": ({"parts": [[0], [4]]}, "client 1: has sample 4; the samples are 0 to 3"),
    "negative": ({"parts": [[-1], [2]]}, "client 0: has sample -1"),
    "not whole": ({"parts": [[0.0], [2.0]]}, "client 0: is float64 of shape (1,); indices are whole numbers"),
    "truth values": ({"parts": [[True, False]]}, "is bool of shape (2,)"),
    "of two axes": ({"parts": [[[0, 1]], [[2, 3]]]}, "is int64 of shape (1, 2)"),
    "ragged": ({"parts": [[[0], [1, 2]]]}, "is not an array of indices"),
    "words": ({"parts": [["a"]]}, "indices are whole numbers"),
    "a sample twice": ({"parts": [[0, 1, 0]]}, "client 0 has sample 0 twice"),
    "a sample of two clients": ({"parts": [[0, 1], [2, 1]]}, "clients 0 and 1 both have sample 1"),
    "of two clients with names": (
        {"parts": [[0, 1], [2, 1]], "client_names": ["Ann", "Bob"]},
        "clients Ann and Bob both have sample 1",
    ),
    "too few names": ({"parts": [[0, 1], [2]], "client_names": ["Ann"]}, "has 2 parts for 1 client names"),
    "too few test parts": ({"parts": [[0, 1], [2]], "test_parts": [[0]]}, "test_parts: has 1 parts for 2 clients"),
    "test samples out of range": ({"test_parts": [[0], [9]]}, "test_parts: client 1: has sample 9"),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_bad_parts(case: str) -> None:
    given, says = BAD_PARTS[case]
    with pytest.raises(UserError, match=r"^custom: ") as error:
        data.from_arrays(X, Y, X, Y, **given)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_torch_tensors_go_in() -> None:
    torch = pytest.importorskip("torch")
    x, y = torch.rand(6, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    own = data.from_arrays(x, y, x, y)
    assert own.shape == (1, 4, 4)
    np.testing.assert_array_equal(own.x_train, x.numpy())
    for given in (x.clone().requires_grad_(), x.bfloat16()):
        own = data.from_arrays(given, y, x, y)
        np.testing.assert_array_equal(own.x_train, given.detach().float().numpy())
        assert data.from_clients([(given, y)], test=(x, y)).x_train.shape == (6, 1, 4, 4)
        rows = list(zip(given, y, strict=True))
        assert data.as_dataset((Rows(rows), Rows(rows))).x_train.dtype == np.float32


class Rows:
    """A torch Dataset, as far as it is asked."""

    def __init__(self, rows: list) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> object:
        return self.rows[i]


def test_objects_that_are_numbers_go_in() -> None:
    """As of a table whose columns have several types; others are refused in one line."""
    x = np.array([[1.5, 2], [3, True], [0.5, 4], [1, 1]], object)
    own = data.from_arrays(x, Y.astype(object), x, Y.astype(object))
    np.testing.assert_array_equal(own.x_train, x.astype(np.float32))
    assert own.y_train.dtype == np.int64
    for bad in (np.array([[1, "a"]] * 4, object), np.array([[1, None]] * 4), np.array([[1], [1, 2], [3], [4]], object)):
        with pytest.raises(UserError, match=r"^custom: x_train (has dtype|is not an array of numbers)"):
            data.from_arrays(bad, Y, bad, Y)
