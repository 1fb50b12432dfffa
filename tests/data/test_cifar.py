"""CIFAR in every form in which people have it; damaged and hostile archives, binary records and pickles."""

from __future__ import annotations

import gzip
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fedman import data
from fedman.data import catalog
from fedman.errors import UserError
from tests.data import data_archives as make
from tests.data.data_bad_files import (
    BOMB,
    Bomb,
    Build,
    Case,
    Change,
    Sandbox,
    drop,
    edit,
    flip,
    keep,
    move,
    put,
    spoil,
    then,
)


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
    make.check(loaded, arrays)
    assert loaded.shape == (3, 32, 32)
    assert loaded.augment
    assert loaded.classes == catalog.SPECS[name].classes


@pytest.mark.usefixtures("small")
def test_default_dir_is_used(own_data_dir: Path) -> None:
    folder, files, arrays = make.cifar_files("cifar100", "binary")
    make.write_folder(own_data_dir / folder, files)
    make.check(data.load("cifar100"), arrays)


# --- bad files --------------------------------------------------------------------------------------------

TAR = "cifar-100-binary.tar.gz"
TOP = "cifar-100-binary"
TRAIN, TEST = f"{TOP}/train.bin", f"{TOP}/test.bin"


def folder(change: Change, name: str = "cifar100", kind: str = "binary") -> Build:
    """The unpacked folder with something changed."""

    def build(root: Path) -> None:
        top, files, _ = make.cifar_files(name, kind)
        change(files)
        make.write_folder(root / top, files)

    return build


def tar(change: Change, *extra: tarfile.TarInfo) -> Build:
    """CIFAR-100's binary archive with something changed."""

    def build(root: Path) -> None:
        files = {f"{TOP}/{name}": content for name, content in make.cifar_files("cifar100", "binary")[1].items()}
        change(files)
        make.write_tar(root / TAR, files, *extra)

    return build


def link(kind: bytes, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(TEST)
    info.type, info.linkname = kind, target
    return info


def huge_pax_header(root: Path) -> None:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, BOMB
    with gzip.open(root / TAR, "wb", 1) as file:
        file.write(header.tobuf() + bytes(BOMB))


def claimed_size(size: int) -> Build:
    """An empty member, then one that claims a size."""
    empty, other = tarfile.TarInfo(f"{TOP}/empty"), tarfile.TarInfo(f"{TOP}/other")
    other.size = size
    headers = empty.tobuf() + other.tobuf(tarfile.GNU_FORMAT)
    return lambda root: (root / TAR).write_bytes(make.gz(headers + bytes(10240)))


def long_tail_with_wrong_checksum(root: Path) -> None:
    """Padding behind the archive's end, more than one read of it; then a checksum that does not fit."""
    tar(keep)(root)
    padded = gzip.decompress((root / TAR).read_bytes()).ljust(1_080_000, b"\0")
    (root / TAR).write_bytes(flip(make.gz(padded), -8))


def many_members(root: Path) -> None:
    make.write_tar(root / TAR, {f"{TOP}/{i}": b"" for i in range(1500)})


def write(content: bytes) -> Build:
    return lambda root: (root / TAR).write_bytes(content)


FILES = {
    "file missing": Case("test.bin", "is missing", folder(drop("test.bin"))),
    "file cut off": Case("train.bin", "expected 24592", folder(edit("train.bin", lambda b: b[:-1]))),
    "file too long": Case("test.bin", "at most 12296", folder(edit("test.bin", lambda b: b + b"x"))),
    "file empty": Case("train.bin", "has 0 bytes", folder(put("train.bin", b""))),
    "label too large": Case(
        "train.bin", "label 100 of record 3", folder(edit("train.bin", lambda b: b[:9223] + b"\x64" + b[9224:]))
    ),
    "folder for a file": Case(
        "test.bin", "not a regular file", then(folder(drop("test.bin")), lambda root: (root / TEST).mkdir())
    ),
    "pipe for a file": Case(
        "test.bin", "not a regular file", then(folder(drop("test.bin")), lambda root: os.mkfifo(root / TEST))
    ),
    "endless device for a file": Case(
        "test.bin",
        "not a regular file",
        then(folder(drop("test.bin")), lambda root: (root / TEST).symlink_to("/dev/zero")),
    ),
    "archive is a folder": Case(TAR, "not a regular file", lambda root: (root / TAR).mkdir()),
    "archive is text": Case(TAR, "not a whole .tar.gz", write(b"<html>404</html>")),
    "archive empty": Case(TAR, "not a whole .tar.gz", write(b"")),
    "gzip of something else": Case(TAR, "not a whole .tar.gz", write(make.gz(b"hello" * 1000))),
    "archive cut off": Case(TAR, "not a whole .tar.gz", then(tar(keep), spoil(TAR, lambda b: b[:20000]))),
    "checksum cut off": Case(TAR, "not a whole .tar.gz", then(tar(keep), spoil(TAR, lambda b: b[:-6]))),
    "checksum wrong": Case(TAR, "not a whole .tar.gz", then(tar(keep), spoil(TAR, lambda b: flip(b, -8)))),
    "checksum wrong, far away": Case(TAR, "not a whole .tar.gz", long_tail_with_wrong_checksum),
    "member missing": Case(TAR, f"no member {TRAIN}", tar(drop(TRAIN))),
    "member name climbs": Case(TAR, f"no member {TRAIN}", tar(move(TRAIN, f"../{TRAIN}"))),
    "member name absolute": Case(TAR, f"no member {TRAIN}", tar(move(TRAIN, f"/{TRAIN}"))),
    "member twice": Case(TAR, "twice", tar(put(f"./{TRAIN}", b""))),
    "member cut off": Case(TAR, "expected 24592", tar(put(TRAIN, bytes(24591)))),
    "member too long": Case(TAR, "at most 24592", tar(put(TRAIN, bytes(24593)))),
    "member a symbolic link": Case(TAR, "not a plain file", tar(drop(TEST), link(tarfile.SYMTYPE, "/etc/passwd"))),
    "member a hard link": Case(TAR, "not a plain file", tar(drop(TEST), link(tarfile.LNKTYPE, TRAIN))),
    "member a device": Case(TAR, "not a plain file", tar(drop(TEST), link(tarfile.CHRTYPE, ""))),
    "gzip bomb": Case(TAR, "unpacks to more than", tar(put(f"{TOP}/zeros", bytes(BOMB)))),
    "header bomb": Case(TAR, "unpacks to more than", huge_pax_header),
    "member bomb": Case(TAR, "unpacks to more than", tar(put(TRAIN, bytes(BOMB)))),
    "size of 2⁷⁰ claimed": Case(TAR, "damaged tar header", claimed_size(2**70)),
    "negative size claimed": Case(TAR, "member", claimed_size(-512)),
    "too many members": Case(TAR, "more than 1000 members", many_members),
}


@pytest.mark.parametrize("case", FILES.values(), ids=FILES)
def test_bad_file(sandbox: Sandbox, case: Case) -> None:
    sandbox.refuses("cifar100", case)


def test_bad_cifar10_batches(sandbox: Sandbox) -> None:
    bad = folder(put("test_batch.bin", b"\xff" * 4 * 3073), "cifar10")
    sandbox.refuses("cifar10", Case("test_batch.bin", "label 255 of record 0", bad))
    missing = then(bad, lambda root: (root / "cifar-10-batches-bin/data_batch_3.bin").unlink())
    sandbox.refuses("cifar10", Case("data_batch_3.bin", "is missing", missing))


# --- pickles -----------------------------------------------------------------------------------------------


def pickled(value: object) -> bytes:
    return make.Python2Pickler().dumps(value)


def batch(**changes: object) -> bytes:
    good: dict[str, object] = {
        "data": make.planes(make.images(8, 0)),
        "fine_labels": list(range(8)),
        "filenames": ["a"] * 8,
    }
    return pickled({key: value for key, value in (good | changes).items() if value is not None})


GOOD = batch()
ARRAY_OF_OBJECTS = pickled({"data": np.zeros((8, 3072), np.uint8)}).replace(b"U\x02u1", b"U\x02O8")
NESTED = b"".join(bytes([*b"q", i, *b"h", i, 0x86]) for i in range(99))  # each tuple holds the one before it twice
PICKLES = {
    "by INST": ("the opcode INST", b"\x80\x02(U\x04trueios\nsystem\n."),
    "by STACK_GLOBAL": ("the opcode", b"\x80\x04\x8c\x02os\x8c\x06system\x93."),
    "by an extension": ("the opcode EXT1", b"\x80\x02\x82\x01."),
    "by a persistent id": ("the opcode BINPERSID", b"\x80\x02NQ."),
    "numpy's file reader": ("numpy.memmap", b"\x80\x02cnumpy\nmemmap\nU\x0b/etc/passwd\x85R."),
    "a long strange global": ("the global", b"\x80\x02c" + b"a\r\x1b" * 200 + b"\nx\n."),
    "a call of ndarray": ("no 'data' array", b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R."),
    "a call of a string": ("no 'data' array", b"\x80\x02U\x01a)R."),
    "an array of objects": ("no 'data' array", ARRAY_OF_OBJECTS),
    "a state for a dictionary": ("no 'data' array", b"\x80\x02}}b."),
    "a huge memo index": ("no 'data' array", b"\x80\x02Nr\xff\xff\xff\x7f."),
    "a huge string promised": ("not a whole pickle", b"\x80\x02T\xff\xff\xff\x7fabc."),
    "a huge array promised": ("no 'data' array", GOOD.replace(b"K\x08J\x00\x0c\x00\x00", b"J\xff\xff\xff\x7fK\x63")),
    "an array that ends with its type": ("no 'data' array", GOOD[: GOOD.index(b"U\x02u1")] + b"."),
    "an array without bytes": ("no 'data' array", GOOD[: GOOD.index(b"K\x03U\x01|")] + b"."),
    "cut off": ("not a whole pickle", GOOD[:-9000]),
    "no end": ("not a whole pickle", GOOD[:-1]),
    "text": ("refused", b"hello"),
    "empty": ("not a whole pickle", b""),
    "nothing on the stack": ("no 'data' array", b"\x80\x02e."),
    "a memo that is not there": ("the opcode BINGET", b"\x80\x02h\x07."),
    "a list for a key": ("no 'data' array", b"\x80\x02}]Ns."),
    "items for no list": ("no 'data' array", b"\x80\x02N(Ne."),
    "a key of many nested tuples": ("the opcode BINGET", b"\x80\x02})" + NESTED + b"Ns."),
    "a key of deeply nested tuples": ("more than 384 opcodes", b"\x80\x02})" + b"\x85" * 20_000 + b"Ns."),
    "a reference to a list": ("the opcode BINGET", b"\x80\x02]q\x01h\x01a."),
    "a list": ("no 'data' array", pickled([1, 2])),
    "no data": ("no 'data' array", batch(data=None)),
    "a list for data": ("no 'data' array", batch(data=[0] * 8)),
    "an image less": ("no 'data' array of 8", batch(data=np.zeros((7, 3072), np.uint8))),
    "wider images": ("no 'data' array of 8", batch(data=np.zeros((4, 6144), np.uint8))),
    "no labels": ("no list 'fine_labels'", batch(fine_labels=None)),
    "a label less": ("no list 'fine_labels' of 8", batch(fine_labels=[1] * 7)),
    "text for labels": ("no list 'fine_labels'", batch(fine_labels=["1"] * 8)),
    "truth values for labels": ("no list 'fine_labels'", batch(fine_labels=[True] * 8)),
    "a label too large": ("label 1000 of record 2", batch(fine_labels=[1, 2, 1000, *range(5)])),
    "a negative label": ("label -1 of record 0", batch(fine_labels=[-1] * 8)),
    "too long": ("at most", batch(filenames=["x" * 200] * 2000)),
}


@pytest.mark.parametrize("name", PICKLES)
def test_bad_pickle(sandbox: Sandbox, name: str) -> None:
    says, content = PICKLES[name]
    case = Case("cifar-100-python/train", says, folder(put("train", content), kind="python"))
    sandbox.refuses("cifar100", case)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_bomb(sandbox: Sandbox, protocol: int, inside: bool) -> None:
    content = pickle.dumps({"data": [Bomb()]} if inside else Bomb(), protocol)
    case = Case("cifar-100-python/train", "refused", folder(put("train", content), kind="python"))
    sandbox.refuses("cifar100", case)
    assert not (sandbox.folder / "canary").exists()
    pickle.loads(content)
    assert (sandbox.folder / "canary").exists(), "the bomb was not live"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["binary", "python"])
def test_flipped_bits_never_escape(tmp_path: Path, kind: str) -> None:
    """Whatever bit of the headers or opcodes is damaged: data of the right form, or one line."""
    top, files, arrays = make.cifar_files("cifar100", kind)
    members = {f"{top}/{name}": content for name, content in files.items()}
    path = make.write_tar(tmp_path / f"{top}.tar.gz", members)
    good = gzip.decompress(path.read_bytes())
    second = good.find(f"{top}/test".encode())
    rng = np.random.default_rng(0)
    messages = []
    for position in rng.choice([*range(900), *range(second, second + 512)], 200, replace=False):
        path.write_bytes(make.gz(flip(good, position, int(rng.integers(8)))))
        try:
            loaded = data.load("cifar100", tmp_path)
        except UserError as error:
            messages.append(str(error))
        else:
            assert loaded.x_train.shape == arrays[0].shape
            assert loaded.y_train.max() < 100
    assert len(messages) > 50
    assert all("\n" not in message and path.name in message for message in messages)
