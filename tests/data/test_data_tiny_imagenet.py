"""Tiny-ImageNet: zip and folder, and the cache of decoded images."""

from __future__ import annotations

import os
from pathlib import Path

import data_archives as make
import numpy as np
import pytest

from fedman import data
from fedman.data import cache, tiny_imagenet

pytestmark = pytest.mark.usefixtures("small")
CACHED = tiny_imagenet.CACHE_NAME


def put(root: Path, form: str) -> None:
    files = make.tiny_files()
    if form == "zip":
        make.write_zip(root / "tiny-imagenet-200.zip", {f"tiny-imagenet-200/{k}": v for k, v in files.items()})
    else:
        make.write_folder(root / ("tiny-imagenet-200" if form == "folder" else "."), files)


def check(loaded: data.Dataset) -> None:
    assert loaded.x_train.shape == (6, 16, 16, 3)
    assert loaded.y_train.tolist() == [0, 0, 1, 1, 2, 2]
    assert loaded.y_test.tolist() == [2, 0, 1]
    assert loaded.shape == (3, 16, 16)
    colours = np.array([[200, 30, 30], [120, 120, 120], [30, 30, 200]])
    for x, y in ((loaded.x_train, loaded.y_train), (loaded.x_test, loaded.y_test)):
        assert np.abs(x.astype(int) - colours[y][:, None, None]).max() <= 3
        assert x.flags.writeable


def no_decoding(*_: object) -> None:
    raise AssertionError("decoded again")


@pytest.mark.parametrize("form", ["zip", "folder", "root"])
def test_decoded_once_then_cached(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, form)
    calls: list[tuple[str, int, int]] = []
    first = data.load("tiny-imagenet", tmp_path, progress=lambda *call: calls.append(call))
    check(first)
    assert calls[-1][1:] == (9, 9)
    assert sorted(p.name for p in tmp_path.glob("*.npy*")) == [CACHED]
    monkeypatch.setattr(tiny_imagenet, "_decode", no_decoding)
    second = data.load("tiny-imagenet", tmp_path)
    check(second)
    np.testing.assert_array_equal(first.x_train, second.x_train)
    np.testing.assert_array_equal(first.x_test, second.x_test)


@pytest.mark.parametrize("form", ["zip", "folder"])
def test_a_changed_source_is_decoded_again(tmp_path: Path, form: str) -> None:
    put(tmp_path, form)
    data.load("tiny-imagenet", tmp_path)
    changed = make.tiny_files() | {"val/images/val_1.JPEG": make.jpeg((0, 255, 0))}
    if form == "zip":
        path = tmp_path / "tiny-imagenet-200.zip"
        make.write_zip(path, {f"tiny-imagenet-200/{k}": v for k, v in changed.items()})
        os.utime(path, ns=(1, 1))
    else:
        path = tmp_path / "tiny-imagenet-200/val/images/val_1.JPEG"
        path.write_bytes(changed["val/images/val_1.JPEG"])
        os.utime(path, ns=(1, 1))
    loaded = data.load("tiny-imagenet", tmp_path)
    assert loaded.x_test[1, 8, 8, 1] > 240


def test_a_changed_archive_of_the_same_size_is_noticed(tmp_path: Path) -> None:
    put(tmp_path, "zip")
    path = tmp_path / "tiny-imagenet-200.zip"
    key = tiny_imagenet._Zip(path).fingerprint()
    os.utime(path, ns=(5, 5))
    assert tiny_imagenet._Zip(path).fingerprint() != key


@pytest.mark.parametrize("damage", ["truncated", "flipped pixel", "flipped label", "empty", "text", "object"])
def test_a_damaged_cache_is_not_used(tmp_path: Path, damage: str) -> None:
    put(tmp_path, "zip")
    check(data.load("tiny-imagenet", tmp_path))
    path = tmp_path / CACHED
    raw = bytearray(path.read_bytes())
    if damage == "flipped pixel":
        raw[1000] ^= 128
    elif damage == "flipped label":
        raw[-40] ^= 1
    elif damage == "object":
        np.save(path, np.array([{}] * 10), allow_pickle=True)
        raw = bytearray(path.read_bytes().ljust(len(raw), b"\0"))
    else:
        raw = {"truncated": raw[:-7], "empty": b"", "text": b"x" * len(raw)}[damage]
    path.write_bytes(raw)
    check(data.load("tiny-imagenet", tmp_path))
    assert path.read_bytes() != raw, "the cache is written anew"
    check(data.load("tiny-imagenet", tmp_path))


def unwritable(root: Path) -> None:
    """A folder in the cache's place: no file can be renamed onto it (a mode would not stop root)."""
    (root / CACHED).mkdir(parents=True)


def test_falls_back_to_the_default_folder(tmp_path: Path, own_data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "zip")
    unwritable(tmp_path)
    check(data.load("tiny-imagenet", tmp_path))
    assert (own_data_dir / CACHED).is_file()
    monkeypatch.setattr(tiny_imagenet, "_decode", no_decoding)
    check(data.load("tiny-imagenet", tmp_path))


def test_goes_on_without_a_cache(tmp_path: Path, own_data_dir: Path) -> None:
    put(tmp_path, "zip")
    unwritable(tmp_path)
    unwritable(own_data_dir)
    with pytest.warns(UserWarning, match="could not be cached"):
        check(data.load("tiny-imagenet", tmp_path))
    assert not list(tmp_path.rglob("*.tmp"))


def test_cache_of_another_key_or_shape_is_not_taken(tmp_path: Path) -> None:
    x, y = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3), np.array([3, 1])
    cache.save(tmp_path / "c.npy", b"k" * 32, x, y)
    found = cache.load(tmp_path / "c.npy", b"k" * 32, 2, (2, 2, 3))
    assert found is not None
    np.testing.assert_array_equal(found[0], x)
    np.testing.assert_array_equal(found[1], y)
    assert cache.load(tmp_path / "c.npy", b"l" * 32, 2, (2, 2, 3)) is None
    assert cache.load(tmp_path / "c.npy", b"k" * 32, 3, (2, 2, 3)) is None
    assert cache.load(tmp_path / "none.npy", b"k" * 32, 2, (2, 2, 3)) is None
