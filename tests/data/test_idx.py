"""MNIST and its like in every form in which people have them; damaged and hostile IDX files."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from fedman import data
from tests.data import data_archives as make
from tests.data.data_bad_files import BOMB, Build, Case, Change, Sandbox, drop, edit, flip, keep, put, then


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
    make.check(loaded, (x_train[..., None], y_train, x_test[..., None], y_test))
    assert loaded.shape == (1, 28, 28)
    assert not loaded.augment


# --- bad files --------------------------------------------------------------------------------------------

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
    "gzip of many parts": Case(IMAGES, "more than 1000 parts", gz(make.gz(b"") * 2000 + PACKED)),
    "gzip padded for ever": Case(IMAGES, "more than a gzip file of", gz(PACKED + bytes(8 << 20))),
    "gzip bomb": Case(IMAGES, "unpacks to more", gz(make.gz(bytes(BOMB)))),
}


@pytest.mark.parametrize("case", IDX.values(), ids=IDX)
def test_bad_idx(sandbox: Sandbox, case: Case) -> None:
    sandbox.refuses("mnist", case)


@pytest.mark.usefixtures("small")
def test_gzip_in_parts_with_padding(tmp_path: Path) -> None:
    files, (x_train, *_) = make.idx_files()
    make.write_folder(tmp_path, files)
    content = files[IMAGES]
    (tmp_path / IMAGES).unlink()
    parts = make.gz(content[:100]) + bytes(10) + make.gz(content[100:]) + bytes(1000)
    (tmp_path / f"{IMAGES}.gz").write_bytes(parts)
    assert (data.load("mnist", tmp_path).x_train == x_train[..., None]).all()


@pytest.mark.parametrize("packed", [False, True])
def test_files_take_no_more_memory_than_their_bytes(tmp_path: Path, packed: bool) -> None:
    """Of the real size; the first labels are those of MNIST."""
    for stem, count in (("train", 60_000), ("t10k", 10_000)):
        labels = np.zeros(count, np.uint8)
        labels[:5] = 5, 0, 4, 1, 9
        for name, header, content in (
            (f"{stem}-images-idx3-ubyte", (0x803, count, 28, 28), bytes(count * 784)),
            (f"{stem}-labels-idx1-ubyte", (0x801, count), labels.tobytes()),
        ):
            raw = struct.pack(f">{len(header)}I", *header) + content
            (tmp_path / (f"{name}.gz" if packed else name)).write_bytes(make.gz(raw) if packed else raw)
    tracemalloc.start()
    loaded = data.load("mnist", tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.2 * (loaded.x_train.nbytes + loaded.x_test.nbytes)
