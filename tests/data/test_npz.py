"""A user's own .npz: how it is split; damaged, hostile and wrong files."""

from __future__ import annotations

import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedman import data
from tests.data import data_archives as make
from tests.data.data_bad_files import Bomb, Build, Case, Sandbox, spoil, then


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


def test_npz_whole_with_a_test_set_beside_it_is_not_split(tmp_path: Path) -> None:
    x, y = np.arange(30.0).reshape(10, 3), np.arange(10) % 2
    np.savez(tmp_path / "my.npz", x=x, y=y, x_test=-x[:4], y_test=y[:4])
    loaded = data.load(f"npz:{tmp_path}/my.npz")
    np.testing.assert_array_equal(loaded.x_train, x)
    np.testing.assert_array_equal(loaded.x_test, -x[:4])


def test_npz_of_a_path(tmp_path: Path) -> None:
    x, y = np.ones((10, 3)), np.arange(10) % 2
    np.savez(tmp_path / "my.npz", x=x, y=y)
    assert data.load(tmp_path / "my.npz").name == str(tmp_path / "my.npz")


@pytest.mark.parametrize(
    "y", [np.linspace(0, 1, 51), np.linspace(0, 1, 102).reshape(51, 2), np.arange(153).reshape(51, 3)]
)
def test_npz_whole_without_class_labels_is_split_at_random(tmp_path: Path, y: np.ndarray) -> None:
    """Numbers, ids: a fifth of all samples, rounded down, with their own targets."""
    x = np.arange(51)[:, None] * np.ones((1, 3))
    np.savez(tmp_path / "my.npz", x=x, y=y)
    loaded = data.load(f"npz:{tmp_path}/my.npz")
    train, test = (each[:, 0].astype(int) for each in (loaded.x_train, loaded.x_test))
    assert sorted([*train, *test]) == list(range(51))
    assert len(test) == 10
    assert np.diff(test).max() > 1
    np.testing.assert_array_equal(loaded.y_train, y[train].astype(loaded.y_train.dtype))
    np.testing.assert_array_equal(loaded.y_test, y[test].astype(loaded.y_test.dtype))


# --- bad files --------------------------------------------------------------------------------------------

FILE = "my.npz"
X, Y = np.ones((10, 3), np.float32), np.arange(10) % 2
IDS = np.full((10, 3), 1_000_000)
SPOILT = np.where(np.arange(30).reshape(10, 3) == 14, np.nan, 1.0)


def save(**arrays: object) -> Build:
    return lambda root: np.savez(root / FILE, **arrays)


def npz(**changes: object) -> Build:
    """A good file with some arrays changed (None: left out)."""
    arrays = {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y} | changes
    return save(**{name: array for name, array in arrays.items() if array is not None})


def x_train(content: bytes) -> Build:
    """A good file but for the bytes of one array."""

    def build(root: Path) -> None:
        npz()(root)
        with zipfile.ZipFile(root / FILE) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        make.write_zip(root / FILE, members | {"x_train.npy": content})

    return build


def npy(shape: str, content: int = 0, version: bytes = b"\1\0") -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + bytes(content)


def pixels(*shape: int) -> np.ndarray:
    return np.ones((10, *shape), np.uint8)


def write(content: bytes) -> Build:
    return lambda root: (root / FILE).write_bytes(content)


def bomb(root: Path) -> None:
    np.savez(root / FILE, x=np.array([Bomb()], dtype=object), y=np.zeros(1, int))


def single(root: Path) -> None:
    np.save(root / "my.npy", X)
    (root / "my.npy").rename(root / FILE)


def repeated(root: Path) -> None:
    make.write_zip(root / FILE, dict.fromkeys(("x.npy", "y.npy", "x", "y"), b""))


def lzma(root: Path) -> None:
    with zipfile.ZipFile(root / FILE, "w", zipfile.ZIP_LZMA) as archive:
        for name in ("x", "y"):
            archive.writestr(f"{name}.npy", b"")


def densely(root: Path) -> None:
    """A hundred kilobytes that unpack to a hundred megabytes."""
    np.savez_compressed(root / FILE, x=np.zeros((100, 1 << 20), np.uint8), y=np.arange(100) % 2)


CASES = {
    "another compression": ("packed in a way that numpy never does", lzma),
    "a bomb": ("at most 100 times as many are allowed; save it with np.savez if it is meant so", densely),
    "no such file": ("cannot be read", lambda root: None),
    "a folder": ("cannot be read", lambda root: (root / FILE).mkdir()),
    "text": ("not a whole .npz", write(b"x,y\n1,2")),
    "a single array": ("not a whole .npz", single),
    "empty": ("not a whole .npz", write(b"")),
    "cut off": ("not a whole .npz", then(npz(), spoil(FILE, lambda b: b[: len(b) // 2]))),
    "damaged": ("not a whole .npz", then(npz(), spoil(FILE, lambda b: b.replace(b"\x80?", b"\x80@", 1)))),
    "no arrays": ("has no arrays", lambda root: make.write_zip(root / FILE, {})),
    "other names": ("wanted are x_train", npz(x_train=None, X=X)),
    "a name of several lines": ("wanted are x_train", save(**{"a\nb": X})),
    "labels missing": ("wanted are x_train", npz(y_test=None)),
    "an array twice": ("twice", repeated),
    "objects": ("objects never are", npz(x_train=np.array([{"a": 1}] * 10, dtype=object))),
    "a pickle bomb": ("objects never are", bomb),
    "strings": ("objects never are", npz(x_train=np.full((10, 3), "a"))),
    "complex numbers": ("allowed are real", npz(x_train=X * 1j)),
    "records": ("allowed are real", npz(x_train=np.zeros((10, 3), [("a", "f4")]))),
    "no header": ("no valid .npy header", x_train(b"hello")),
    "code for a header": ("no valid .npy header", x_train(npy("__import__('os').getcwd()"))),
    "nested header": ("no valid .npy header", x_train(npy("(" * 9000 + ")" * 9000))),
    "endless signs in a header": (FILE, x_train(npy(f"({'-' * 9000}1,)"))),
    "unknown version": ("no valid .npy header", x_train(npy("(10, 3)", 120, b"\3\0"))),
    "shape too large": ("has shape (10, 4) but 120 bytes", x_train(npy("(10, 4)", 120))),
    "shape too small": ("has shape (10, 2) but 120 bytes", x_train(npy("(10, 2)", 120))),
    "shape beyond memory": ("has shape", x_train(npy("(1000000000000, 3)"))),
    "shape negative": ("has shape (-10, -3)", x_train(npy("(-10, -3)", 120))),
    "not finite": ("x_train has a value that is not finite in float32 (sample 4)", npz(x_train=SPOILT)),
    "beyond float32": ("x_test has a value that is not finite", npz(x_test=X.astype(float) * 1e300)),
    "a label less": ("x_train has 10 samples but y_train has 9 labels", npz(y_train=np.arange(9))),
    "labels of two kinds": ("targets of one kind", npz(y_train=Y / 1.0)),
    "labels of two shapes": ("targets of one kind", npz(y_train=np.eye(10, dtype=int))),
    "labels without an axis": ("targets need an axis", npz(y_train=np.int64(1))),
    "targets not finite": ("y_test has a value that is not finite in float32 (sample 3)", npz(y_test=SPOILT[1:, 2])),
    "ids below the padding": ("labels -2 to -1; allowed are -1 to", npz(y_train=np.stack([Y - 2, Y - 2], 1))),
    "ids of the inputs beyond bounds": (
        "has an id 1000000",
        npz(x_train=IDS, x_test=IDS, y_train=IDS * 0, y_test=IDS * 0),
    ),
    "inputs beyond int64": ("must fit into int64", npz(x_train=np.full((10, 3), 2**63, np.uint64))),
    "labels negative": ("labels -1 to 0", npz(y_train=Y - 1)),
    "labels beyond bounds": ("labels 0 to 10000000000", npz(y_train=Y * 10**10)),
    "labels beyond int64": ("labels 0 to 18446744073709551615", npz(y_train=Y.astype(np.uint64) * (2**64 - 1))),
    "no samples": ("is empty", npz(x_train=X[:0], y_train=Y[:0])),
    "no features": ("is empty", npz(x_train=X[:, :0])),
    "one axis": ("at least two axes", npz(x_train=X[:, 0])),
    "no axis": ("at least two axes", npz(x_train=np.float32(1))),
    "one class": ("at least two classes", npz(y_train=Y * 0, y_test=Y * 0)),
    "two shapes": ("one kind", npz(x_test=np.ones((10, 4)))),
    "pixels and numbers": ("one kind", npz(x_train=pixels(3, 3, 1), x_test=np.ones((10, 3, 3, 1)))),
    "nine channels": ("uint8 images are", npz(x_train=pixels(9, 9, 9))),
    "five axes": ("uint8 images are", npz(x_train=pixels(3, 3, 3, 3))),
    "x and y of two lengths": ("not samples with their targets", save(x=X, y=Y[:9])),
    "y without an axis": ("not samples with their targets", save(x=X, y=np.int64(1))),
    "x and y too few": ("no class has the 5 samples that a test set needs", save(x=X, y=np.arange(10))),
    "x and numbers too few": ("has not the 5 samples that a test set needs", save(x=X[:4], y=X[:4])),
    "x and y empty": ("that a test set needs", save(x=X[:0], y=Y[:0])),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_npz(sandbox: Sandbox, name: str) -> None:
    says, build = CASES[name]
    sandbox.refuses(f"npz:{sandbox.root / FILE}", Case(FILE, says, build))


def test_a_file_takes_no_more_memory_than_its_arrays_twice(tmp_path: Path) -> None:
    """Images and numbers; also where they are split into training and test set."""
    images = np.random.default_rng(0).integers(0, 256, (2000, 32, 32, 3), np.uint8)
    y = np.arange(2000) % 2
    for x in (images, images.reshape(2000, -1).astype(np.float32)):
        np.savez(tmp_path / "my.npz", x_train=x, y_train=y, x_test=x[:100], y_test=y[:100])
        tracemalloc.start()
        data.load(f"npz:{tmp_path}/my.npz")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * 1.05 * x.nbytes


def test_members_without_an_ending_are_read_too(tmp_path: Path) -> None:
    """np.savez always writes one."""
    np.savez(tmp_path / "my.npz", x=X.repeat(5, 0), y=Y.repeat(5, 0))
    with zipfile.ZipFile(tmp_path / "my.npz") as archive:
        members = {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}
    make.write_zip(tmp_path / "my.npz", members)
    assert len(data.load(f"npz:{tmp_path}/my.npz").y_train) == 40
