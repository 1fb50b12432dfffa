"""Writers of the official formats, for tests: what the loaders read is made here independently of them."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from fedman.data import Dataset

WNIDS = ("n03444034", "n01443537", "n02808440")  # not in order: a class number is the place in the sorted list


def images(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)


def planes(x: np.ndarray) -> np.ndarray:
    """[n, 32, 32, 3] as rows of three colour planes, CIFAR's order."""
    return np.stack([x[..., c].reshape(len(x), -1) for c in range(3)], axis=1).reshape(len(x), -1)


def cifar_binary(x: np.ndarray, y: np.ndarray, coarse: bool = False) -> bytes:
    labels = np.stack([y // 5, y], axis=1) if coarse else y[:, None]
    return np.concatenate([labels.astype(np.uint8), planes(x)], axis=1).tobytes()


class Python2Pickler:
    """Protocol 2 as Python 2 and numpy 1 wrote it (str is SHORT_BINSTRING, arrays by _reconstruct)."""

    def __init__(self) -> None:
        self.out = io.BytesIO()
        self.memo = 0

    def dumps(self, value: object) -> bytes:
        self.out.write(b"\x80\x02")
        self.save(value)
        return self.out.getvalue() + b"."

    def put(self) -> None:
        small = self.memo < 256
        self.out.write(b"q" + bytes([self.memo]) if small else b"r" + struct.pack("<I", self.memo))
        self.memo += 1

    def save(self, value: object) -> None:
        write = self.out.write
        match value:
            case None:
                write(b"N")
            case bool():
                write(b"\x88" if value else b"\x89")
            case int():
                write(b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value))
            case str():
                raw = value.encode("latin-1")
                write(b"U" + bytes([len(raw)]) + raw if len(raw) < 256 else b"T" + struct.pack("<i", len(raw)) + raw)
                self.put()
            case tuple():
                write(b"" if len(value) < 4 else b"(")
                for item in value:
                    self.save(item)
                write({1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t"))
                self.put()
            case list():
                write(b"]")
                self.put()
                for start in range(0, len(value), 1000):
                    write(b"(")
                    for item in value[start : start + 1000]:
                        self.save(item)
                    write(b"e")
            case dict():
                write(b"}")
                self.put()
                write(b"(")
                for key, item in value.items():
                    self.save(key)
                    self.save(item)
                write(b"u")
            case np.ndarray():
                self.array(value)
            case _:
                raise TypeError(type(value))

    def name(self, module: str, name: str) -> None:
        self.out.write(f"c{module}\n{name}\n".encode())
        self.put()

    def array(self, value: np.ndarray) -> None:
        write = self.out.write
        fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        self.name("numpy.core.multiarray", "_reconstruct")
        self.name("numpy", "ndarray")
        self.save((0,))
        self.save("b")
        write(b"\x87R")
        self.put()
        write(b"(")
        self.save(1)
        self.save(value.shape)
        self.name("numpy", "dtype")
        self.save((value.dtype.str[1:], 0, 1))
        write(b"R")
        self.put()
        self.save((3, "|", None, None, None, -1, -1, 0))
        write(b"b")
        self.save(fortran)
        self.save(value.tobytes(order="A").decode("latin-1"))
        write(b"tb")


def cifar_python(x: np.ndarray, y: np.ndarray, coarse: bool = False, fortran: bool = False) -> bytes:
    rows = planes(x)
    batch = {
        "batch_label": "training batch 1 of 1",
        "fine_labels" if coarse else "labels": y.tolist(),
        "data": np.asfortranarray(rows) if fortran else rows,
        "filenames": [f"a_long_enough_name_s_{i:06d}.png" for i in range(len(x))],
    }
    if coarse:
        batch["coarse_labels"] = (y // 5).tolist()
    return Python2Pickler().dumps(batch)


def cifar_files(name: str, kind: str) -> tuple[str, dict[str, bytes], tuple[np.ndarray, ...]]:
    """Folder, files and the arrays they hold, for the small CIFAR sets of conftest.py."""
    coarse = name == "cifar100"
    write = cifar_binary if kind == "binary" else cifar_python
    if coarse:
        sizes, folder, classes = {"train": 8, "test": 4}, f"cifar-100-{kind}", 100
    else:
        sizes = {f"data_batch_{i}": 2 for i in range(1, 6)} | {"test_batch": 4}
        folder, classes = ("cifar-10-batches-bin" if kind == "binary" else "cifar-10-batches-py"), 10
    suffix = ".bin" if kind == "binary" else ""
    xs = {part: images(n, seed) for seed, (part, n) in enumerate(sizes.items())}
    ys = {part: np.random.default_rng(len(part)).integers(0, classes, n) for part, n in sizes.items()}
    files = {f"{part}{suffix}": write(xs[part], ys[part], coarse) for part in sizes}
    *train, test = sizes
    arrays = (
        np.concatenate([xs[part] for part in train]),
        np.concatenate([ys[part] for part in train]),
        xs[test],
        ys[test],
    )
    return folder, files, arrays


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_tar(path: Path, files: Mapping[str, bytes], *extra: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in extra:
            tar.addfile(info)
    return path


def write_zip(path: Path, files: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def jpeg(colour: tuple[int, int, int] | int, size: tuple[int, int] = (16, 16)) -> bytes:
    out = io.BytesIO()
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(out, "JPEG", quality=95)
    return out.getvalue()


def tiny_files() -> dict[str, bytes]:
    """The small Tiny-ImageNet: two training images and one validation image a class, in plain colours."""
    colours = {"n01443537": (200, 30, 30), "n02808440": 120, "n03444034": (30, 30, 200)}
    files = {"wnids.txt": "\n".join(WNIDS).encode(), "words.txt": b"n01443537\tgoldfish\n"}
    for wnid in WNIDS:
        files[f"train/{wnid}/{wnid}_boxes.txt"] = b""
        for i in range(2):
            files[f"train/{wnid}/images/{wnid}_{i}.JPEG"] = jpeg(colours[wnid])
    lines = [f"val_{i}.JPEG\t{wnid}\t0\t1\t2\t3\n" for i, wnid in enumerate(WNIDS)]
    files["val/val_annotations.txt"] = "".join(lines).encode()
    for i, wnid in enumerate(WNIDS):
        files[f"val/images/val_{i}.JPEG"] = jpeg(colours[wnid])
    files["test/images/test_0.JPEG"] = b"never read"
    return files


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_files(name: str = "mnist") -> tuple[dict[str, bytes], tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(5)
    first = {"mnist": (5, 0, 4, 1, 9), "fashion-mnist": (9, 0, 0, 3, 0)}[name]
    x = [rng.integers(0, 256, (n, 28, 28), dtype=np.uint8) for n in (6, 4)]
    y = [np.array([*first, 7], dtype=np.uint8), np.array([1, 2, 3, 0], dtype=np.uint8)]
    stems = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    arrays = (x[0], y[0], x[1], y[1])
    return {f"{stem}-ubyte": idx(a) for stem, a in zip(stems, arrays, strict=True)}, arrays


def gz(data: bytes) -> bytes:
    return gzip.compress(data, 1)


def check(loaded: Dataset, arrays: tuple[np.ndarray, ...]) -> None:
    """The data set holds these arrays, as bytes and whole numbers that may be written to."""
    found = (loaded.x_train, loaded.y_train, loaded.x_test, loaded.y_test)
    for a, b in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(a, b)
    assert loaded.x_train.dtype == loaded.x_test.dtype == np.uint8
    assert loaded.y_train.dtype == loaded.y_test.dtype == np.int64
    assert all(a.flags.writeable and a.flags.c_contiguous for a in found)
