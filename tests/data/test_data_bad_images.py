"""Damaged and hostile Tiny-ImageNet and IDX files; data sets that are not there."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import data_archives as make
import pytest
from data_bad_files import BOMB, Build, Case, Change, Range, drop, edit, flip, keep, move, put, spoil, then
from PIL import Image

from fedman import data
from fedman.errors import UserError

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
def test_bad_tiny_imagenet(shooting_range: Range, case: Case) -> None:
    shooting_range.refuses("tiny-imagenet", case)


# --- IDX ---------------------------------------------------------------------------------------------------

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"


def idx(change: Change, source: str = "mnist") -> Build:
    def build(root: Path) -> None:
        files, _ = make.idx_files(source)
        change(files)
        make.write_folder(root / "MNIST/raw", files)

    return build


def gz(content: bytes) -> Build:
    """A gzipped file of images in the place of the plain one."""
    return then(idx(drop(IMAGES)), lambda root: (root / f"MNIST/raw/{IMAGES}.gz").write_bytes(content))


PACKED = make.gz(make.idx_files()[0][IMAGES])
IDX = {
    "labels missing": Case(LABELS, "has no", idx(drop(LABELS))),
    "test images missing": Case(TEST_IMAGES, "has no", idx(drop(TEST_IMAGES))),
    "wrong magic": Case(IMAGES, "not an IDX file", idx(edit(IMAGES, lambda b: b"\1" + b[1:]))),
    "labels for images": Case(IMAGES, "not an IDX file", idx(put(IMAGES, make.idx_files()[0][LABELS]))),
    "wrong count": Case(LABELS, "not an IDX file", idx(put(LABELS, struct.pack(">II", 0x801, 7) + bytes(6)))),
    "count beyond memory": Case(
        IMAGES, "not an IDX file", idx(put(IMAGES, struct.pack(">4I", 0x803, *[2**32 - 1] * 3)))
    ),
    "cut off": Case(IMAGES, "expected", idx(edit(IMAGES, lambda b: b[:-1]))),
    "too long": Case(IMAGES, "at most", idx(edit(IMAGES, lambda b: b + b"x"))),
    "empty": Case(IMAGES, "not an IDX file", idx(put(IMAGES, b""))),
    "label too large": Case(LABELS, "label 10 of record 5", idx(edit(LABELS, lambda b: b[:-1] + b"\x0a"))),
    "another set of the same shape": Case(LABELS, "another data set", idx(keep, "fashion-mnist")),
    "gzip cut off": Case(IMAGES, "not a whole gzip", gz(PACKED[:-9])),
    "gzip is text": Case(IMAGES, "not a whole gzip", gz(b"<html>")),
    "gzip checksum wrong": Case(IMAGES, "not a whole gzip", gz(flip(PACKED, -5))),
    "gzip damaged": Case(IMAGES, "not a whole gzip", gz(flip(PACKED, 40, 5))),
    "gzip bomb": Case(IMAGES, "unpacks to more", gz(make.gz(bytes(BOMB)))),
}


@pytest.mark.parametrize("case", IDX.values(), ids=IDX)
def test_bad_idx(shooting_range: Range, case: Case) -> None:
    shooting_range.refuses("mnist", case)


# --- nothing there -----------------------------------------------------------------------------------------


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
