"""Every data set in every form in which people have it on disk."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import data_archives as make
import numpy as np
import pytest

from fedman import data
from fedman.data import catalog, dataset, pickled
from fedman.errors import UserError


def check(loaded: data.Dataset, arrays: tuple[np.ndarray, ...]) -> None:
    found = (loaded.x_train, loaded.y_train, loaded.x_test, loaded.y_test)
    for a, b in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(a, b)
    assert loaded.x_train.dtype == loaded.x_test.dtype == np.uint8
    assert loaded.y_train.dtype == loaded.y_test.dtype == np.int64
    assert all(a.flags.writeable and a.flags.c_contiguous for a in found)


# --- light imports -----------------------------------------------------------------------------------------


def test_names_need_neither_numpy_nor_anything_heavy() -> None:
    code = (
        "import sys, fedman.data; names = list(fedman.data.SPECS); "
        "assert not {'numpy', 'torch', 'PIL', 'matplotlib', 'pydantic'} & set(sys.modules), sys.modules; "
        "fedman.data.load('digits'); from fedman.data import partition, download, cifar, tiny_imagenet, idx; "
        "assert not {'torch', 'PIL', 'matplotlib', 'pydantic', 'typer'} & set(sys.modules); print(*names)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["digits", "cifar10", "cifar100", "tiny-imagenet", "mnist", "fashion-mnist"]


def test_facts_of_the_paper() -> None:
    spec = catalog.SPECS["cifar100"]
    assert (spec.classes, spec.shape, spec.train, spec.test) == (100, (3, 32, 32), 50_000, 10_000)
    assert spec.mean == (0.5071, 0.4867, 0.4408)
    assert spec.std == (0.2675, 0.2565, 0.2761)
    assert {name: s.target for name, s in catalog.SPECS.items() if s.target} == {
        "cifar100": 50.0,
        "tiny-imagenet": 28.0,
    }
    assert {name for name, s in catalog.SPECS.items() if s.augment} == {
        "cifar10",
        "cifar100",
        "tiny-imagenet",
    }


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean cifar100") as error:
        data.load("cifar-100")
    assert "tiny-imagenet" in str(error.value)


def test_default_dir(monkeypatch: pytest.MonkeyPatch, own_data_dir: Path) -> None:
    assert data.default_dir() == own_data_dir
    monkeypatch.delenv("FEDMAN_DATA")
    assert data.default_dir() == Path("~/.cache/fedman").expanduser()


# --- digits ------------------------------------------------------------------------------------------------


def test_digits() -> None:
    digits = data.load("digits")
    assert digits.x_train.shape == (1437, 8, 8, 1)
    assert digits.x_test.shape == (360, 8, 8, 1)
    assert digits.shape == (1, 8, 8)
    assert digits.x_train.min() == 0
    assert digits.x_train.max() == 255
    assert np.unique(np.concatenate([digits.x_train, digits.x_test])).size == 17
    assert np.bincount(digits.y_train).tolist() == [143, 146, 142, 146, 144, 145, 144, 143, 141, 143]
    assert not digits.augment
    first = [0, 0, 5, 13, 9, 1, 0, 0]
    assert digits.x_train[0, 0, :, 0].tolist() == [round(v * 255 / 16) for v in first]
    mean, std = dataset.channel_statistics(digits.x_train)
    np.testing.assert_allclose((*mean, *std), (*digits.mean, *digits.std), atol=5e-5)


# --- CIFAR -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("place", ["folder", "archive", "root"])
@pytest.mark.parametrize("kind", ["binary", "python"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar(tmp_path: Path, name: str, kind: str, place: str) -> None:
    folder, files, arrays = make.cifar_files(name, kind)
    if place == "archive":
        members = {f"{folder}/readme.html": b"hello"} | {f"{folder}/{key}": file for key, file in files.items()}
        make.write_tar(tmp_path / f"{name.replace('cifar', 'cifar-')}-{kind}.tar.gz", members)
    else:
        make.write_folder(tmp_path / folder if place == "folder" else tmp_path, files)
    loaded = data.load(name, tmp_path)
    check(loaded, arrays)
    assert loaded.shape == (3, 32, 32)
    assert loaded.augment
    assert loaded.classes == catalog.SPECS[name].classes


@pytest.mark.usefixtures("small")
def test_default_dir_is_used(own_data_dir: Path) -> None:
    folder, files, arrays = make.cifar_files("cifar100", "binary")
    make.write_folder(own_data_dir / folder, files)
    check(data.load("cifar100"), arrays)


@pytest.mark.parametrize("fortran", [False, True])
def test_pickles_are_read_as_the_unpickler_would(fortran: bool) -> None:
    x, y = make.images(300, 1), np.arange(300) % 100
    raw = make.cifar_python(x, y, coarse=True, fortran=fortran)
    expected = pickle.loads(raw, encoding="bytes")
    atoms = pickled.read(raw, "train")
    np.testing.assert_array_equal(pickled.array(atoms, b"data", (300, 3072)), expected[b"data"])
    assert pickled.numbers(atoms, b"fine_labels") == expected[b"fine_labels"]
    assert pickled.numbers(atoms, b"coarse_labels") == expected[b"coarse_labels"]


# --- IDX ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "MNIST/raw"),
        ("mnist", "MNIST"),
        ("mnist", "."),
        ("mnist", "mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
    ],
)
def test_idx(tmp_path: Path, name: str, folder: str, packed: bool, dotted: bool) -> None:
    files, (x_train, y_train, x_test, y_test) = make.idx_files(name)
    for stem, content in files.items():
        file = stem.replace("-idx", ".idx") if dotted else stem
        file, content = (f"{file}.gz", make.gz(content)) if packed else (file, content)
        make.write_folder(tmp_path / folder, {file: content})
    loaded = data.load(name, tmp_path)
    check(loaded, (x_train[..., None], y_train, x_test[..., None], y_test))
    assert loaded.shape == (1, 28, 28)
    assert not loaded.augment


# --- a user's own ------------------------------------------------------------------------------------------


def test_npz_split(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 7)), np.arange(50) % 5
    np.savez_compressed(tmp_path / "my.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    for name in (f"npz:{tmp_path}/my.npz", f"{tmp_path}/my.npz"):
        loaded = data.load(name)
        assert loaded.name == name
        assert loaded.x_train.dtype == np.float32
        np.testing.assert_array_equal(loaded.x_train, x[:40].astype(np.float32))
        np.testing.assert_array_equal(loaded.y_test, y[40:])
        assert (loaded.classes, loaded.shape, loaded.mean, loaded.std) == (5, (7,), (0.0,), (1.0,))


def test_npz_whole_is_split_class_by_class_and_always_the_same(tmp_path: Path) -> None:
    y = np.random.default_rng(3).permutation(np.repeat([0, 1, 2], [50, 30, 4]))
    x = np.arange(len(y))[:, None] * np.ones((1, 3))
    np.savez(tmp_path / "my.npz", x=np.asfortranarray(x), y=y)
    loaded = data.load(f"npz:{tmp_path}/my.npz")
    assert np.bincount(loaded.y_test, minlength=3).tolist() == [10, 6, 0]
    ids = np.concatenate([loaded.x_train[:, 0], loaded.x_test[:, 0]]).astype(int)
    assert sorted(ids.tolist()) == list(range(84))
    np.testing.assert_array_equal(y[ids], np.concatenate([loaded.y_train, loaded.y_test]))
    np.testing.assert_array_equal(loaded.x_test, data.load(f"npz:{tmp_path}/my.npz").x_test)


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
