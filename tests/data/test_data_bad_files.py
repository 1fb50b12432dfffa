"""Damaged and hostile files: each ends in one line that names the file, runs nothing and writes nothing."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import data_archives as make
import numpy as np
import pytest

from fedman import data
from fedman.errors import UserError

Build = Callable[[Path], object]
BOMB = 64 << 20
ROOM = 16 << 20  # what a loader may take for the small data sets, bombs or not


class Case(NamedTuple):
    dataset: str
    file: str  # the error names this file
    says: str  # and says this
    build: Build


# --- CIFAR -------------------------------------------------------------------------------------------------

ARCHIVE = {kind: f"cifar-100-{kind}.tar.gz" for kind in ("binary", "python")}


def folder(kind: str, change: Callable[[dict[str, bytes]], object], name: str = "cifar100") -> Build:
    """An unpacked CIFAR folder with something changed."""

    def build(root: Path) -> None:
        top, files, _ = make.cifar_files(name, kind)
        change(files)
        make.write_folder(root / top, files)

    return build


def tar(change: Callable[[dict[str, bytes]], object], *extra: tarfile.TarInfo) -> Build:
    """CIFAR-100's binary archive with something changed."""

    def build(root: Path) -> None:
        top, files, _ = make.cifar_files("cifar100", "binary")
        members = {f"{top}/{name}": content for name, content in files.items()}
        change(members)
        make.write_tar(root / ARCHIVE["binary"], members, *extra)

    return build


def raw(file: str, change: Callable[[bytes], bytes], build: Build) -> Build:
    """What `build` makes, then one of its files changed byte by byte."""

    def both(root: Path) -> None:
        build(root)
        path = root / file
        path.write_bytes(change(path.read_bytes()))

    return both


def keep(files: dict[str, bytes]) -> None:
    pass


def link(name: str, kind: bytes, target: str = "/etc/passwd") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def labelled(value: int) -> Callable[[dict[str, bytes]], object]:
    """The fine label of record 3 of train.bin set to `value`."""

    def change(files: dict[str, bytes]) -> None:
        content = bytearray(files["train.bin"])
        content[3 * 3074 + 1] = value
        files["train.bin"] = bytes(content)

    return change


def pickled(value: object) -> Callable[[dict[str, bytes]], object]:
    return lambda files: files.update(train=make.Python2Pickler().dumps(value))


def batch(**changes: object) -> Callable[[dict[str, bytes]], object]:
    x, y = make.images(8, 0), np.arange(8)
    good: dict[str, object] = {"data": make.planes(x), "fine_labels": y.tolist(), "filenames": ["a"] * 8}
    return pickled({key: value for key, value in (good | changes).items() if value is not None})


def bytes_as(content: bytes) -> Callable[[dict[str, bytes]], object]:
    return lambda files: files.update(train=content)


class Bomb:
    """What a hostile pickle does: run a command as it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {os.environ['CANARY']}",)


def bomb(protocol: int, inside: bool) -> Build:
    def build(root: Path) -> None:
        hostile = pickle.dumps({b"data": [Bomb()]} if inside else Bomb(), protocol)
        folder("python", bytes_as(hostile))(root)

    return build


def huge_pax_header(root: Path) -> None:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, BOMB
    with gzip.open(root / ARCHIVE["binary"], "wb", 1) as file:
        file.write(header.tobuf() + bytes(BOMB))


def many_members(root: Path) -> None:
    with tarfile.open(root / ARCHIVE["binary"], "w:gz", compresslevel=1) as archive:
        for i in range(1500):
            archive.addfile(tarfile.TarInfo(f"cifar-100-binary/{i}"))


def object_array() -> bytes:
    """numpy's state of an array of objects, as a Python 2 pickle would have it."""
    out = make.Python2Pickler().dumps({"data": np.zeros((8, 3072), np.uint8)})
    return out.replace(b"U\x02u1", b"U\x02O8")


CIFAR = {
    "folder without a file": Case("cifar100", "test.bin", "missing", folder("binary", lambda f: f.pop("test.bin"))),
    "a batch missing": Case(
        "cifar10",
        "data_batch_3.bin",
        "missing",
        folder("binary", lambda f: f.pop("data_batch_3.bin"), "cifar10"),
    ),
    "truncated file": Case(
        "cifar100",
        "train.bin",
        "expected 24592",
        folder("binary", lambda f: f.update({"train.bin": f["train.bin"][:-1]})),
    ),
    "file too long": Case(
        "cifar100",
        "test.bin",
        "at most 12296",
        folder("binary", lambda f: f.update({"test.bin": f["test.bin"] + b"x"})),
    ),
    "empty file": Case(
        "cifar100", "train.bin", "has 0 bytes", folder("binary", lambda f: f.update({"train.bin": b""}))
    ),
    "fine label too large": Case("cifar100", "train.bin", "label 100 of record 3", folder("binary", labelled(100))),
    "label too large": Case(
        "cifar10",
        "test_batch.bin",
        "label 255 of record 0",
        folder("binary", lambda f: f.update({"test_batch.bin": b"\xff" + f["test_batch.bin"][1:]}), "cifar10"),
    ),
    "folder in place of a file": Case(
        "cifar100",
        "test.bin",
        "not a regular file",
        lambda root: (
            folder("binary", lambda f: f.pop("test.bin"))(root),
            (root / "cifar-100-binary/test.bin").mkdir(),
        ),
    ),
    "pipe in place of a file": Case(
        "cifar100",
        "test.bin",
        "not a regular file",
        lambda root: (
            folder("binary", lambda f: f.pop("test.bin"))(root),
            os.mkfifo(root / "cifar-100-binary/test.bin"),
        ),
    ),
    "endless device in place of a file": Case(
        "cifar100",
        "train.bin",
        "not a regular file",
        lambda root: (
            folder("binary", lambda f: f.pop("train.bin"))(root),
            (root / "cifar-100-binary/train.bin").symlink_to("/dev/zero"),
        ),
    ),
    "archive is a folder": Case(
        "cifar100", ARCHIVE["binary"], "not a regular file", lambda root: (root / ARCHIVE["binary"]).mkdir()
    ),
    "archive is text": Case(
        "cifar100",
        ARCHIVE["binary"],
        "not a whole .tar.gz",
        lambda root: (root / ARCHIVE["binary"]).write_text("<html>404</html>"),
    ),
    "archive is empty": Case(
        "cifar100", ARCHIVE["binary"], "not a whole .tar.gz", lambda root: (root / ARCHIVE["binary"]).touch()
    ),
    "gzip of something else": Case(
        "cifar100",
        ARCHIVE["binary"],
        "not a whole .tar.gz",
        lambda root: (root / ARCHIVE["binary"]).write_bytes(make.gz(b"hello" * 1000)),
    ),
    "archive cut off": Case(
        "cifar100",
        ARCHIVE["binary"],
        "not a whole .tar.gz",
        raw(ARCHIVE["binary"], lambda b: b[:20000], tar(keep)),
    ),
    "checksum of the archive cut off": Case(
        "cifar100",
        ARCHIVE["binary"],
        "not a whole .tar.gz",
        raw(ARCHIVE["binary"], lambda b: b[:-6], tar(keep)),
    ),
    "checksum of the archive wrong": Case(
        "cifar100",
        ARCHIVE["binary"],
        "not a whole .tar.gz",
        raw(ARCHIVE["binary"], lambda b: b[:-8] + bytes([b[-8] ^ 1]) + b[-7:], tar(keep)),
    ),
    "member missing": Case(
        "cifar100", ARCHIVE["binary"], "no member", tar(lambda f: f.pop("cifar-100-binary/train.bin"))
    ),
    "member in another place": Case(
        "cifar100",
        ARCHIVE["binary"],
        "no member cifar-100-binary/train.bin",
        tar(lambda f: f.update({"../cifar-100-binary/train.bin": f.pop("cifar-100-binary/train.bin")})),
    ),
    "member twice": Case(
        "cifar100",
        ARCHIVE["binary"],
        "twice",
        tar(lambda f: f.update({"./cifar-100-binary/train.bin": f["cifar-100-binary/train.bin"]})),
    ),
    "member truncated": Case(
        "cifar100",
        ARCHIVE["binary"],
        "expected 24592",
        tar(lambda f: f.update({"cifar-100-binary/train.bin": bytes(24591)})),
    ),
    "member too long": Case(
        "cifar100",
        ARCHIVE["binary"],
        "at most 24592",
        tar(lambda f: f.update({"cifar-100-binary/train.bin": bytes(24593)})),
    ),
    "member is a symbolic link": Case(
        "cifar100",
        ARCHIVE["binary"],
        "not a plain file",
        tar(
            lambda f: f.pop("cifar-100-binary/test.bin"),
            link("cifar-100-binary/test.bin", tarfile.SYMTYPE),
        ),
    ),
    "member is a hard link": Case(
        "cifar100",
        ARCHIVE["binary"],
        "not a plain file",
        tar(
            lambda f: f.pop("cifar-100-binary/test.bin"),
            link("cifar-100-binary/test.bin", tarfile.LNKTYPE, "cifar-100-binary/train.bin"),
        ),
    ),
    "gzip bomb": Case(
        "cifar100",
        ARCHIVE["binary"],
        "unpacks to more than",
        tar(lambda f: f.update({"cifar-100-binary/zeros": bytes(BOMB)})),
    ),
    "tar header bomb": Case("cifar100", ARCHIVE["binary"], "unpacks to more than", huge_pax_header),
    "member bomb": Case(
        "cifar100",
        ARCHIVE["binary"],
        "at most 24592",
        tar(lambda f: f.update({"cifar-100-binary/train.bin": bytes(BOMB)})),
    ),
    "too many members": Case("cifar100", ARCHIVE["binary"], "more than 1000 members", many_members),
    "pickle bomb, protocol 0": Case("cifar100", "train", "the opcode", bomb(0, False)),
    "pickle bomb, protocol 2": Case("cifar100", "train", "posix.system", bomb(2, False)),
    "pickle bomb, protocol 4": Case("cifar100", "train", "the opcode", bomb(4, False)),
    "pickle bomb in a dictionary": Case("cifar100", "train", "global", bomb(2, True)),
    "pickle by the INST opcode": Case(
        "cifar100", "train", "the opcode INST", folder("python", bytes_as(b"(S'true'\nios\nsystem\n."))
    ),
    "pickle of numpy's file reader": Case(
        "cifar100",
        "train",
        "numpy.memmap",
        folder("python", bytes_as(b"\x80\x02cnumpy\nmemmap\nU\x0b/etc/passwd\x85R.")),
    ),
    "pickle calls ndarray": Case(
        "cifar100",
        "train",
        "a call other than",
        folder("python", bytes_as(b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R.")),
    ),
    "pickle with an object array": Case(
        "cifar100", "train", "a call other than", folder("python", bytes_as(object_array()))
    ),
    "pickle with a huge memo index": Case(
        "cifar100",
        "train",
        "not a pickled dictionary",
        folder("python", bytes_as(b"\x80\x02Nr\xff\xff\xff\x7f.")),
    ),
    "pickle claims a huge string": Case(
        "cifar100",
        "train",
        "not a whole pickle",
        folder("python", bytes_as(b"\x80\x02T\xff\xff\xff\x7fabc.")),
    ),
    "pickle truncated": Case(
        "cifar100",
        "train",
        "not a whole pickle",
        folder("python", lambda f: f.update(train=f["train"][:-9000])),
    ),
    "pickle without an end": Case(
        "cifar100", "train", "not a whole pickle", folder("python", lambda f: f.update(train=f["train"][:-1]))
    ),
    "pickle is text": Case("cifar100", "train", "whole pickle", folder("python", bytes_as(b"<html></html>"))),
    "pickle empty": Case("cifar100", "train", "not a whole pickle", folder("python", bytes_as(b""))),
    "pickle with nothing on the stack": Case(
        "cifar100", "train", "not a whole pickle", folder("python", bytes_as(b"\x80\x02e."))
    ),
    "pickle with a list as key": Case(
        "cifar100", "train", "not a whole pickle", folder("python", bytes_as(b"\x80\x02}]Ns."))
    ),
    "pickle of a list": Case("cifar100", "train", "not a pickled dictionary", folder("python", pickled([1, 2]))),
    "pickle without data": Case("cifar100", "train", "no 'data' array", folder("python", batch(data=None))),
    "pickle with a list for data": Case(
        "cifar100", "train", "no 'data' array", folder("python", batch(data=[[0] * 3072] * 8))
    ),
    "pickle with fewer images": Case(
        "cifar100",
        "train",
        "no 'data' array of 8",
        folder("python", batch(data=np.zeros((7, 3072), np.uint8))),
    ),
    "pickle with wide images": Case(
        "cifar100",
        "train",
        "no 'data' array of 8",
        folder("python", batch(data=np.zeros((4, 6144), np.uint8))),
    ),
    "pickle without fine labels": Case(
        "cifar100", "train", "no list 'fine_labels'", folder("python", batch(fine_labels=None))
    ),
    "pickle with a label less": Case(
        "cifar100", "train", "no list 'fine_labels' of 8", folder("python", batch(fine_labels=[1] * 7))
    ),
    "pickle with text for a label": Case(
        "cifar100", "train", "no list 'fine_labels'", folder("python", batch(fine_labels=["1"] * 8))
    ),
    "pickle with a truth value for a label": Case(
        "cifar100", "train", "no list 'fine_labels'", folder("python", batch(fine_labels=[True] * 8))
    ),
    "pickle with a label too large": Case(
        "cifar100",
        "train",
        "label 1000 of record 2",
        folder("python", batch(fine_labels=[1, 2, 1000, *range(5)])),
    ),
    "pickle with a negative label": Case(
        "cifar100", "train", "label -1 of record 0", folder("python", batch(fine_labels=[-1] * 8))
    ),
    "pickle too long": Case("cifar100", "train", "at most", folder("python", batch(filenames=["x" * 200] * 2000))),
}


# --- Tiny-ImageNet -----------------------------------------------------------------------------------------

ZIP = "tiny-imagenet-200.zip"
NOTES = "val/val_annotations.txt"
FIRST = "train/n01443537/images/n01443537_0.JPEG"


def tiny(change: Callable[[dict[str, bytes]], object], packed: bool = True) -> Build:
    def build(root: Path) -> None:
        files = make.tiny_files()
        change(files)
        members = {f"tiny-imagenet-200/{name}": content for name, content in files.items()}
        make.write_zip(root / ZIP, members) if packed else make.write_folder(root, members)

    return build


def png(root: Path) -> None:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (16, 16)).save(out, "PNG")
    tiny(lambda f: f.update({FIRST: out.getvalue()}))(root)


def twice(root: Path) -> None:
    tiny(keep)(root)
    with zipfile.ZipFile(root / ZIP, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(f"tiny-imagenet-200/{FIRST}", b"x")


def flags(bit: int) -> Build:
    """A zip with a general-purpose flag set in all its headers (1: encrypted)."""

    def build(root: Path) -> None:
        tiny(keep)(root)
        content = bytearray((root / ZIP).read_bytes())
        for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            start = content.find(mark)
            while start >= 0:
                content[start + offset] |= bit
                start = content.find(mark, start + 1)
        (root / ZIP).write_bytes(content)

    return build


def annotated(text: str) -> Callable[[dict[str, bytes]], object]:
    return lambda files: files.update({NOTES: text.encode()})


TINY = {
    "zip is text": Case("tiny-imagenet", ZIP, "not a whole zip", lambda root: (root / ZIP).write_text("hello")),
    "zip is empty": Case("tiny-imagenet", ZIP, "not a whole zip", lambda root: (root / ZIP).touch()),
    "zip cut off": Case("tiny-imagenet", ZIP, "not a whole zip", raw(ZIP, lambda b: b[:-300], tiny(keep))),
    "zip is a folder": Case("tiny-imagenet", ZIP, "not a regular file", lambda root: (root / ZIP).mkdir()),
    "zip encrypted": Case("tiny-imagenet", ZIP, "cannot be unpacked", flags(1)),
    "zip member damaged": Case(
        "tiny-imagenet",
        ZIP,
        "cannot be unpacked",
        raw(ZIP, lambda b: _flip_data_of(b, f"tiny-imagenet-200/{FIRST}"), tiny(keep)),
    ),
    "zip with other folders": Case(
        "tiny-imagenet", ZIP, "0 training images", lambda root: make.write_zip(root / ZIP, make.tiny_files())
    ),
    "zip with names that climb": Case(
        "tiny-imagenet",
        ZIP,
        "5 training images of 3",
        tiny(lambda f: f.update({f"../../{FIRST}": f.pop(FIRST)})),
    ),
    "zip with absolute names": Case(
        "tiny-imagenet",
        ZIP,
        "0 training images",
        lambda root: make.write_zip(root / ZIP, {f"/tiny-imagenet-200/{k}": v for k, v in make.tiny_files().items()}),
    ),
    "zip member twice": Case("tiny-imagenet", ZIP, "twice", twice),
    "zip bomb": Case("tiny-imagenet", ZIP, "at most", tiny(lambda f: f.update({FIRST: bytes(BOMB)}))),
    "image missing": Case("tiny-imagenet", ZIP, "5 training images", tiny(lambda f: f.pop(FIRST))),
    "image too many": Case(
        "tiny-imagenet",
        ZIP,
        "7 training images of 4 classes",
        tiny(lambda f: f.update({"train/n99999999/images/n99999999_0.JPEG": b""})),
    ),
    "image is text": Case(
        "tiny-imagenet", ZIP, f"{FIRST} is not a whole JPEG", tiny(lambda f: f.update({FIRST: b"hi"}))
    ),
    "image is empty": Case("tiny-imagenet", ZIP, "not a whole JPEG", tiny(lambda f: f.update({FIRST: b""}))),
    "image cut off": Case(
        "tiny-imagenet",
        ZIP,
        "not a whole JPEG",
        tiny(lambda f: f.update({FIRST: f[FIRST][: len(f[FIRST]) // 2]})),
    ),
    "image is a PNG": Case("tiny-imagenet", ZIP, "not a whole JPEG", png),
    "image of another size": Case(
        "tiny-imagenet", ZIP, "is 32x16, not 16x16", tiny(lambda f: f.update({FIRST: make.jpeg(1, (32, 16))}))
    ),
    "image claims to be huge": Case(
        "tiny-imagenet",
        ZIP,
        "is 65000x65000, not 16x16",
        tiny(lambda f: f.update({FIRST: f[FIRST].replace(b"\x08\x00\x10\x00\x10", b"\x08" + b"\xfd\xe8" * 2)})),
    ),
    "annotations missing": Case(
        "tiny-imagenet", ZIP, f"no member tiny-imagenet-200/{NOTES}", tiny(lambda f: f.pop(NOTES))
    ),
    "annotations empty": Case("tiny-imagenet", NOTES, "has 0 lines, expected 3", tiny(annotated(""))),
    "annotation of an unknown class": Case(
        "tiny-imagenet", NOTES, "line 1", tiny(annotated("val_0.JPEG\tn00000000\t0\n"))
    ),
    "annotation without a tab": Case("tiny-imagenet", NOTES, "line 1", tiny(annotated("val_0.JPEG n01443537\n"))),
    "annotation of a path": Case("tiny-imagenet", NOTES, "line 1", tiny(annotated("../../x.JPEG\tn01443537\n"))),
    "annotation twice": Case("tiny-imagenet", NOTES, "line 2", tiny(annotated("val_0.JPEG\tn01443537\n" * 2))),
    "annotations binary": Case("tiny-imagenet", NOTES, "line 1", tiny(lambda f: f.update({NOTES: bytes(range(256))}))),
    "validation image missing": Case(
        "tiny-imagenet",
        ZIP,
        "no member tiny-imagenet-200/val/images/val_2.JPEG",
        tiny(lambda f: f.pop("val/images/val_2.JPEG")),
    ),
    "folder without validation image": Case(
        "tiny-imagenet",
        "val_2.JPEG",
        "is missing",
        tiny(lambda f: f.pop("val/images/val_2.JPEG"), packed=False),
    ),
    "folder without annotations": Case("tiny-imagenet", NOTES, "missing", tiny(lambda f: f.pop(NOTES), packed=False)),
    "folder without training images": Case(
        "tiny-imagenet",
        "tiny-imagenet-200",
        "0 training images of 0 classes",
        lambda root: (root / "tiny-imagenet-200").mkdir(),
    ),
    "folder with a long image": Case(
        "tiny-imagenet", FIRST, "at most", tiny(lambda f: f.update({FIRST: bytes(2 << 20)}), packed=False)
    ),
}


def _flip_data_of(content: bytes, name: str) -> bytes:
    """Flip a bit in the packed data of the member `name`."""
    start = content.index(name.encode()) + len(name) + 40
    return content[:start] + bytes([content[start] ^ 64]) + content[start + 1 :]


# --- IDX ---------------------------------------------------------------------------------------------------

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(change: Callable[[dict[str, bytes]], object], packed: bool = False, source: str = "mnist") -> Build:
    def build(root: Path) -> None:
        files, _ = make.idx_files(source)
        change(files)
        if packed:
            files = {f"{name}.gz": make.gz(content) for name, content in files.items()}
        make.write_folder(root / "MNIST/raw", files)

    return build


IDX = {
    "labels missing": Case("mnist", LABELS, "has no", idx(lambda f: f.pop(LABELS))),
    "test images missing": Case(
        "mnist", "t10k-images-idx3-ubyte", "has no", idx(lambda f: f.pop("t10k-images-idx3-ubyte"))
    ),
    "wrong magic": Case("mnist", IMAGES, "not an IDX file", idx(lambda f: f.update({IMAGES: b"\1" + f[IMAGES][1:]}))),
    "labels in place of images": Case("mnist", IMAGES, "not an IDX file", idx(lambda f: f.update({IMAGES: f[LABELS]}))),
    "wrong count": Case(
        "mnist",
        LABELS,
        "not an IDX file",
        idx(lambda f: f.update({LABELS: struct.pack(">II", 0x801, 7) + bytes(6)})),
    ),
    "count beyond memory": Case(
        "mnist",
        IMAGES,
        "not an IDX file",
        idx(lambda f: f.update({IMAGES: struct.pack(">4I", 0x803, *[2**32 - 1] * 3)})),
    ),
    "images cut off": Case("mnist", IMAGES, "expected", idx(lambda f: f.update({IMAGES: f[IMAGES][:-1]}))),
    "images too long": Case("mnist", IMAGES, "at most", idx(lambda f: f.update({IMAGES: f[IMAGES] + b"x"}))),
    "empty": Case("mnist", IMAGES, "not an IDX file", idx(lambda f: f.update({IMAGES: b""}))),
    "label too large": Case(
        "mnist", LABELS, "label 10 of record 5", idx(lambda f: f.update({LABELS: f[LABELS][:-1] + b"\x0a"}))
    ),
    "gzip cut off": Case(
        "mnist", IMAGES, "not a whole gzip", raw(f"MNIST/raw/{IMAGES}.gz", lambda b: b[:-9], idx(keep, True))
    ),
    "gzip is text": Case(
        "mnist",
        IMAGES,
        "not a whole gzip",
        raw(f"MNIST/raw/{IMAGES}.gz", lambda b: b"<html>", idx(keep, True)),
    ),
    "gzip checksum wrong": Case(
        "mnist",
        IMAGES,
        "not a whole gzip",
        raw(f"MNIST/raw/{IMAGES}.gz", lambda b: b[:-5] + bytes([b[-5] ^ 1]) + b[-4:], idx(keep, True)),
    ),
    "gzip bomb": Case("mnist", IMAGES, "unpacks to more", idx(lambda f: f.update({IMAGES: bytes(BOMB)}), True)),
    "another data set of the same shape": Case("mnist", LABELS, "another data set", idx(keep, source="fashion-mnist")),
}


# --- .npz --------------------------------------------------------------------------------------------------


def npz(**changes: object) -> Build:
    x, y = np.ones((10, 3), np.float32), np.arange(10) % 2
    arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y} | changes
    return lambda root: np.savez(root / "my.npz", **{k: v for k, v in arrays.items() if v is not None})


def members(**files: bytes) -> Build:
    def build(root: Path) -> None:
        npz()(root)
        with zipfile.ZipFile(root / "my.npz") as archive:
            content = {name: archive.read(name) for name in archive.namelist()}
        make.write_zip(root / "my.npz", content | {f"{name}.npy": data for name, data in files.items()})

    return build


def header(shape: str, descr: str = "'<f4'", version: bytes = b"\1\0") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text


ONES = np.ones((10, 3), np.float32)
SPOILT = np.where(np.arange(30).reshape(10, 3) == 14, np.nan, 1.0)
OWN = {
    "no such file": ("cannot be read", lambda root: None),
    "a folder": ("cannot be read", lambda root: (root / "my.npz").mkdir()),
    "text": ("not a whole .npz", lambda root: (root / "my.npz").write_text("x,y\n1,2")),
    "a single array": ("not a whole .npz", lambda root: np.save(open(root / "my.npz", "wb"), ONES)),  # noqa: SIM115
    "empty": ("not a whole .npz", lambda root: (root / "my.npz").touch()),
    "cut off": ("not a whole .npz", raw("my.npz", lambda b: b[: len(b) // 2], npz())),
    "a damaged member": (
        "not a whole .npz",
        raw("my.npz", lambda b: b.replace(b"\0\0\x80?", b"\0\0\x80@", 1), npz()),
    ),
    "no arrays": ("has no arrays", lambda root: make.write_zip(root / "my.npz", {})),
    "other names": ("wanted are x_train", npz(x_train=None, X=ONES)),
    "labels missing": ("wanted are x_train", npz(y_test=None)),
    "objects": ("objects never are", npz(x_train=np.array([{"a": 1}] * 10, dtype=object))),
    "a pickle bomb": (
        "objects never are",
        lambda root: np.savez(root / "my.npz", x=np.array([Bomb()], dtype=object), y=np.zeros(1, int)),
    ),
    "strings": ("objects never are", npz(x_train=np.full((10, 3), "a"))),
    "complex numbers": ("allowed are real", npz(x_train=ONES * 1j)),
    "records": ("allowed are real", npz(x_train=np.zeros((10, 3), [("a", "f4")]))),
    "no header": ("no valid .npy header", members(x_train=b"hello")),
    "a header of code": ("no valid .npy header", members(x_train=header("__import__('os').getcwd()"))),
    "an unknown version": ("no valid .npy header", members(x_train=header("(10, 3)", version=b"\3\0"))),
    "a header that promises more": ("has shape (10, 4) but", members(x_train=header("(10, 4)") + bytes(120))),
    "a header that promises less": ("has shape (10, 2) but", members(x_train=header("(10, 2)") + bytes(120))),
    "a header beyond memory": ("at most", members(x_train=header("(1000000000000, 3)"))),
    "a header with negative axes": ("has shape", members(x_train=header("(-10, -3)") + bytes(120))),
    "not finite": ("sample 4", npz(x_train=SPOILT)),
    "beyond float32": ("sample 0", npz(x_test=np.full((10, 3), 1e300))),
    "fewer labels": ("x_train has 10 samples but y_train has 9", npz(y_train=np.arange(9))),
    "labels as numbers with a point": ("whole numbers", npz(y_train=np.arange(10) / 1.0)),
    "labels as truth values": ("whole numbers", npz(y_train=np.arange(10) > 3)),
    "labels one-hot": ("whole numbers of shape [n]", npz(y_train=np.eye(10, dtype=int))),
    "negative labels": ("labels -1 to 1", npz(y_train=np.arange(10) % 3 - 1)),
    "labels beyond all bounds": ("labels 0 to 10000000000", npz(y_train=np.arange(10) % 2 * 10**10)),
    "no samples": ("is empty", npz(x_train=np.ones((0, 3)), y_train=np.arange(0))),
    "no features": ("is empty", npz(x_train=np.ones((10, 0)))),
    "samples without axes": ("at least two axes", npz(x_train=np.ones(10))),
    "one class": ("at least two classes", npz(y_train=np.zeros(10, int), y_test=np.zeros(10, int))),
    "test samples of another shape": ("one kind", npz(x_test=np.ones((10, 4)))),
    "pixels and numbers": (
        "one kind",
        npz(x_test=np.ones((10, 3, 3, 1)), x_train=np.ones((10, 3, 3, 1), np.uint8)),
    ),
    "pixels with many channels": ("uint8 images are", npz(x_train=np.ones((10, 9, 9, 9), np.uint8))),
    "pixels with five axes": ("uint8 images are", npz(x_train=np.ones((10, 3, 3, 3, 3), np.uint8))),
    "x and y of different lengths": (
        "not samples with their labels",
        lambda root: np.savez(root / "my.npz", x=ONES, y=np.arange(9)),
    ),
    "x and y too few to split": (
        "that a test set needs",
        lambda root: np.savez(root / "my.npz", x=ONES, y=np.arange(10)),
    ),
    "x and y empty": (
        "that a test set needs",
        lambda root: np.savez(root / "my.npz", x=ONES[:0], y=np.arange(0)),
    ),
    "an array twice": (
        "twice",
        lambda root: make.write_zip(root / "my.npz", {f"{n}.npy": b"" for n in ("x", "y", "z")} | {"x": b"", "y": b""}),
    ),
}

ALL = (
    {f"cifar: {name}": case for name, case in CIFAR.items()}
    | {f"tiny-imagenet: {name}": case for name, case in TINY.items()}
    | {f"idx: {name}": case for name, case in IDX.items()}
    | {f"npz: {name}": Case("npz:{root}/my.npz", "my.npz", says, build) for name, (says, build) in OWN.items()}
)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ALL)
def test_bad_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_data_dir: Path) -> None:
    canary = tmp_path / "canary"
    monkeypatch.setenv("CANARY", str(canary))
    root = tmp_path / "data"
    root.mkdir()
    case = ALL[name]
    case.build(root)
    before = sorted(tmp_path.rglob("*"))
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as error:
            data.load(case.dataset.format(root=root), root)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(error.value)
    assert "\n" not in message
    assert case.file in message
    assert case.says in message
    assert len(message) < 400 + 2 * len(str(root))
    assert peak < ROOM
    assert sorted(tmp_path.rglob("*")) == before
    assert not list(own_data_dir.iterdir())
    assert not canary.exists()


def test_the_canary_would_sing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bombs above are live: the standard unpickler runs them."""
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    pickle.loads(pickle.dumps(Bomb(), 2))
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("name", "mentions"),
    [
        (
            "cifar10",
            [
                "cifar-10-binary.tar.gz",
                "cifar-10-batches-bin/",
                "cifar-10-python.tar.gz",
                "cifar-10-batches-py/",
            ],
        ),
        (
            "cifar100",
            ["cifar-100-binary.tar.gz", "cifar-100-binary/", "cifar-100-python.tar.gz", "cifar-100-python/"],
        ),
        ("tiny-imagenet", ["tiny-imagenet-200.zip", "tiny-imagenet-200/"]),
        ("mnist", ["train-images-idx3-ubyte[.gz]", "t10k-labels-idx1-ubyte[.gz]", "MNIST/raw/"]),
        ("fashion-mnist", ["FashionMNIST/raw/"]),
    ],
)
def test_missing_data_says_where_what_and_how(tmp_path: Path, name: str, mentions: list[str]) -> None:
    for root in (tmp_path, tmp_path / "not there"):
        with pytest.raises(UserError) as error:
            data.load(name, root)
        message = str(error.value)
        assert "\n" not in message
        for mention in (*mentions, str(root), f"`fedman data get {name}`"):
            assert mention in message


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["binary", "python"])
def test_flipped_bits_never_escape(tmp_path: Path, kind: str) -> None:
    """Whatever byte of an archive is damaged: the data as they were, or one line."""
    top, files, arrays = make.cifar_files("cifar100", kind)
    path = make.write_tar(tmp_path / ARCHIVE[kind], {f"{top}/{name}": content for name, content in files.items()})
    good = gzip.decompress(path.read_bytes())
    rng = np.random.default_rng(0)
    headers = [b for start in (0, good.find(f"{top}/test".encode())) for b in range(start, start + 512)]
    opcodes = [b for b in range(512, 900)]
    for position in rng.choice([*headers, *opcodes], 150, replace=False):
        bad = bytearray(good)
        bad[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(make.gz(bytes(bad)))
        try:
            loaded = data.load("cifar100", tmp_path)
        except UserError as error:
            assert "\n" not in str(error)
            assert ARCHIVE[kind] in str(error)
        else:
            assert loaded.x_train.shape == arrays[0].shape
            assert loaded.y_train.max() < 100
