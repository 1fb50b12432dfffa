"""Tiny-ImageNet: zip and folder, the cache of decoded images; damaged and hostile files."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedman import data
from fedman.data import tiny_imagenet
from tests.data import data_archives as make
from tests.data.data_bad_files import BOMB, Build, Case, Change, Sandbox, drop, edit, flip, keep, move, put, spoil, then

pytestmark = pytest.mark.usefixtures("small")
CACHED = tiny_imagenet.CACHE_NAME


def store(root: Path, form: str) -> None:
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
    store(tmp_path, form)
    calls: list[tuple[str, int, int]] = []
    first = data.load("tiny-imagenet", tmp_path, progress=lambda *call: calls.append(call))
    check(first)
    assert calls[-1][1:] == (9, 9)
    assert sorted(p.name for p in tmp_path.glob("*.np*")) == [CACHED]
    monkeypatch.setattr(tiny_imagenet, "_decode", no_decoding)
    second = data.load("tiny-imagenet", tmp_path)
    check(second)
    np.testing.assert_array_equal(first.x_train, second.x_train)
    np.testing.assert_array_equal(first.x_test, second.x_test)


@pytest.mark.parametrize("form", ["zip", "folder"])
def test_a_changed_source_is_decoded_again(tmp_path: Path, form: str) -> None:
    store(tmp_path, form)
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


def test_an_archive_of_another_time_is_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path, "zip")
    data.load("tiny-imagenet", tmp_path)
    os.utime(tmp_path / "tiny-imagenet-200.zip", ns=(5, 5))
    monkeypatch.setattr(tiny_imagenet, "_decode", no_decoding)
    with pytest.raises(AssertionError, match="decoded again"):
        data.load("tiny-imagenet", tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "flipped pixel", "flipped label", "empty", "text", "object"])
def test_a_damaged_cache_is_not_used(tmp_path: Path, damage: str) -> None:
    store(tmp_path, "zip")
    check(data.load("tiny-imagenet", tmp_path))
    path = tmp_path / CACHED
    raw = bytearray(path.read_bytes())
    if damage == "flipped pixel":
        raw[1000] ^= 128
    elif damage == "flipped label":
        raw[raw.index(bytes([0, 0, 1, 1, 2, 2, 2, 0, 1]))] ^= 1
    elif damage == "object":
        np.savez(path, images=np.array([{}] * 9), labels=np.zeros(9), key=np.zeros(32))
        raw = bytearray(path.read_bytes())
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
    store(tmp_path, "zip")
    unwritable(tmp_path)
    check(data.load("tiny-imagenet", tmp_path))
    assert (own_data_dir / CACHED).is_file()
    monkeypatch.setattr(tiny_imagenet, "_decode", no_decoding)
    check(data.load("tiny-imagenet", tmp_path))


def test_goes_on_without_a_cache(tmp_path: Path, own_data_dir: Path) -> None:
    store(tmp_path, "zip")
    unwritable(tmp_path)
    unwritable(own_data_dir)
    with pytest.warns(UserWarning, match="could not be cached"):
        check(data.load("tiny-imagenet", tmp_path))
    assert not list(tmp_path.rglob("*.tmp"))


# --- bad files --------------------------------------------------------------------------------------------

TOP = "tiny-imagenet-200"
ZIP = f"{TOP}.zip"
NOTES = "val/val_annotations.txt"
FIRST = "train/n01443537/images/n01443537_0.JPEG"
VAL = "val/images/val_2.JPEG"


def packed(change: Change, top: str = f"{TOP}/") -> Build:
    """The zip with something changed."""

    def build(root: Path) -> None:
        files = make.tiny_files()
        change(files)
        make.write_zip(root / ZIP, {f"{top}{name}": content for name, content in files.items()})

    return build


def unpacked(change: Change) -> Build:
    """The folder with something changed."""

    def build(root: Path) -> None:
        files = make.tiny_files()
        change(files)
        make.write_folder(root / TOP, files)

    return build


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (16, 16)).save(out, "PNG")
    return out.getvalue()


def add_again(root: Path) -> None:
    with zipfile.ZipFile(root / ZIP, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(f"{TOP}/{FIRST}", b"x")


def mark_encrypted(content: bytes) -> bytes:
    changed = bytearray(content)
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = content.find(signature)
        while start >= 0:
            changed[start + offset] |= 1
            start = content.find(signature, start + 1)
    return bytes(changed)


def damage_first(content: bytes) -> bytes:
    return flip(content, content.index(FIRST.encode()) + len(FIRST) + 40, 6)


def huge(content: bytes) -> bytes:
    return content.replace(b"\x08\x00\x10\x00\x10", b"\x08" + b"\xfd\xe8" * 2)


def notes(text: str) -> Build:
    return packed(put(NOTES, text.encode()))


TINY = {
    "zip is text": Case(ZIP, "not a whole zip", lambda root: (root / ZIP).write_text("hello")),
    "zip empty": Case(ZIP, "not a whole zip", lambda root: (root / ZIP).touch()),
    "zip cut off": Case(ZIP, "not a whole zip", then(packed(keep), spoil(ZIP, lambda b: b[:-300]))),
    "zip is a folder": Case(ZIP, "not a regular file", lambda root: (root / ZIP).mkdir()),
    "zip encrypted": Case(ZIP, "cannot be unpacked", then(packed(keep), spoil(ZIP, mark_encrypted))),
    "member damaged": Case(ZIP, f"{FIRST} cannot be unpacked", then(packed(keep), spoil(ZIP, damage_first))),
    "no top folder": Case(ZIP, "0 training images", packed(keep, "")),
    "all names climb": Case(ZIP, "0 training images", packed(keep, f"../../{TOP}/")),
    "all names absolute": Case(ZIP, "0 training images", packed(keep, f"/{TOP}/")),
    "one name climbs": Case(ZIP, "5 training images of 3", packed(move(FIRST, f"../../{FIRST}"))),
    "member twice": Case(ZIP, "twice", then(packed(keep), add_again)),
    "zip bomb": Case(ZIP, "at most", packed(put(FIRST, bytes(BOMB)))),
    "image missing": Case(ZIP, "5 training images", packed(drop(FIRST))),
    "class too many": Case(ZIP, "7 training images of 4", packed(put("train/n99999999/images/a.JPEG", b""))),
    "image is text": Case(ZIP, f"{FIRST} is not a whole JPEG", packed(put(FIRST, b"hello"))),
    "image empty": Case(ZIP, "not a whole JPEG", packed(put(FIRST, b""))),
    "image cut off": Case(ZIP, "not a whole JPEG", packed(edit(FIRST, lambda b: b[: len(b) // 2]))),
    "image is a PNG": Case(ZIP, "not a whole JPEG", packed(put(FIRST, png()))),
    "image of another size": Case(ZIP, "is 32x16, not 16x16", packed(put(FIRST, make.jpeg(1, (32, 16))))),
    "image claims to be huge": Case(ZIP, "is 65000x65000", packed(edit(FIRST, huge))),
    "annotations missing": Case(ZIP, f"no member {TOP}/{NOTES}", packed(drop(NOTES))),
    "annotations empty": Case(NOTES, "has 0 lines, expected 3", notes("")),
    "annotations binary": Case(NOTES, "line 1", packed(put(NOTES, bytes(range(256))))),
    "annotations a bomb": Case(ZIP, "at most", packed(put(NOTES, bytes(BOMB)))),
    "unknown class": Case(NOTES, "line 1", notes("val_0.JPEG\tn00000000\t0\n")),
    "no tab": Case(NOTES, "line 1", notes("val_0.JPEG n01443537\n")),
    "a path": Case(NOTES, "line 1", notes("../../x.JPEG\tn01443537\n")),
    "a name twice": Case(NOTES, "line 2", notes("val_0.JPEG\tn01443537\n" * 2)),
    "validation image missing": Case(ZIP, f"no member {TOP}/{VAL}", packed(drop(VAL))),
    "folder: validation image missing": Case(VAL, "is missing", unpacked(drop(VAL))),
    "folder: annotations missing": Case(NOTES, "is missing", unpacked(drop(NOTES))),
    "folder: nothing in it": Case(TOP, "0 training images", lambda root: (root / TOP).mkdir()),
    "folder: image too long": Case(FIRST, "at most", unpacked(put(FIRST, bytes(2 << 20)))),
    "folder: image cut off": Case(FIRST, "not a whole JPEG", unpacked(edit(FIRST, lambda b: b[:300]))),
}


@pytest.mark.parametrize("case", TINY.values(), ids=TINY)
def test_bad_tiny_imagenet(sandbox: Sandbox, case: Case) -> None:
    sandbox.refuses("tiny-imagenet", case)
