"""Loading by name, and a user's own arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedman import data
from fedman.errors import UserError


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


def test_flat_pixels_are_scaled_and_constant_channels_do_not_divide_by_zero() -> None:
    flat = np.full((4, 10), 255, dtype=np.uint8)
    assert data.from_arrays(flat, [0, 1, 0, 1], flat, [0, 1, 0, 1]).x_train.max() == 1.0
    black = np.zeros((4, 2, 2), dtype=np.uint8)
    assert data.from_arrays(black, [0, 1, 0, 1], black, [0, 1, 0, 1]).std == (1.0,)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, bool])
def test_numbers_of_the_user(dtype: type) -> None:
    x = np.arange(12).reshape(4, 3).astype(dtype)
    own = data.from_arrays(x, np.array([0, 1, 2, 0], np.uint8), x, [1, 1, 1, 4])
    np.testing.assert_array_equal(own.x_test, x.astype(np.float32))
    assert own.classes == 5


def test_torch_tensors_go_in() -> None:
    torch = pytest.importorskip("torch")
    x, y = torch.rand(6, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    own = data.from_arrays(x, y, x, y)
    assert own.shape == (1, 4, 4)
    np.testing.assert_array_equal(own.x_train, x.numpy())
    with pytest.raises(UserError, match=r"custom: x_train is not an array"):
        data.from_arrays(x.requires_grad_(), y, x, y)
