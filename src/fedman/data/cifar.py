"""CIFAR-10 and CIFAR-100: binary and python distribution, each as the official .tar.gz or unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedman.data import files, pickled
from fedman.data.catalog import Progress, Spec
from fedman.errors import UserError

PIXELS = 3 * 32 * 32
OPCODES = 16  # of a record's labels and file name in the python distribution, at most
NAME_BYTES = 256  # room for a record's labels, file name and opcodes in the python distribution


class Layout(NamedTuple):
    """One distribution: its folder, also in the archive, and its files, the test set's last. `labels`: bytes of labels
    before each binary record (the last one counts), or the key of the labels in the pickled dictionary."""

    folder: str
    files: tuple[str, ...]
    labels: int | bytes

    def counts(self, spec: Spec) -> dict[str, int]:
        """Records in each file."""
        *train, test = self.files
        return {**dict.fromkeys(train, spec.train // len(train)), test: spec.test}

    def limits(self, spec: Spec) -> dict[str, int]:
        """The most bytes each file may have."""
        beside, once = (self.labels, 0) if isinstance(self.labels, int) else (NAME_BYTES, NAME_BYTES * 16)
        return {name: n * (PIXELS + beside) + once for name, n in self.counts(spec).items()}


_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
LAYOUTS = {
    "cifar-10-binary.tar.gz": Layout("cifar-10-batches-bin", tuple(f"{name}.bin" for name in _BATCHES), 1),
    "cifar-10-python.tar.gz": Layout("cifar-10-batches-py", _BATCHES, b"labels"),
    "cifar-100-binary.tar.gz": Layout("cifar-100-binary", ("train.bin", "test.bin"), 2),
    "cifar-100-python.tar.gz": Layout("cifar-100-python", ("train", "test"), b"fine_labels"),
}


def read(spec: Spec, root: Path, progress: Progress | None = None) -> files.Arrays:
    """The first distribution found: as an unpacked folder, as the archive, or its files in `root` itself."""
    layouts = {archive: LAYOUTS[archive] for archive in (*spec.files, *spec.also)}
    for archive, layout in layouts.items():
        limits = layout.limits(spec)
        if (root / layout.folder).is_dir():
            return _arrays(spec, layout, files.read_folder(root / layout.folder, limits))
        if (root / archive).exists():
            return _arrays(spec, layout, files.read_tar_gz(root / archive, layout.folder, limits))
        if all((root / name).is_file() for name in layout.files):
            return _arrays(spec, layout, files.read_folder(root, limits))
    raise files.not_found(spec, root, [name for archive, x in layouts.items() for name in (f"{x.folder}/", archive)])


def _arrays(spec: Spec, layout: Layout, content: list[files.Content]) -> files.Arrays:
    parts = []
    for n in layout.counts(spec).values():
        where, data = content.pop(0)
        if isinstance(layout.labels, int):
            x, y = _binary(where, data, n, layout.labels)
        else:
            x, y = _python(where, data, n, layout.labels)
        parts.append((_colours_last(x), files.check_labels(where, y, spec.classes)))
    *train, test = parts
    if len(train) == 1:
        return *train[0], *test
    xs, ys = zip(*train, strict=True)
    return np.concatenate(xs), np.concatenate(ys), *test


def _colours_last(pixels: np.ndarray) -> np.ndarray:
    """Images `[n, 32, 32, 3]` from one colour after the other: in blocks that fit into a core's cache, which is much
    faster than a transposition as a whole."""
    planes, block = pixels.reshape(len(pixels), 3, -1), 256
    images = np.empty((len(pixels), 32 * 32, 3), np.uint8)
    for start in range(0, len(pixels), block):
        for colour in range(3):
            images[start : start + block, :, colour] = planes[start : start + block, colour]
    return images.reshape(-1, 32, 32, 3)


def _binary(where: str, data: bytes | bytearray, n: int, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels `[n, PIXELS]`, one colour after the other, and labels."""
    record = label_bytes + PIXELS
    if len(data) != n * record:
        raise UserError(f"{where}: has {len(data)} bytes, expected {n * record} ({n} records of {record})")
    records = np.frombuffer(data, np.uint8).reshape(n, record)
    return records[:, label_bytes:], records[:, label_bytes - 1]


def _python(where: str, data: bytes | bytearray, n: int, key: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The same from the python distribution."""
    atoms = pickled.read(data, where, OPCODES * n + NAME_BYTES)
    pixels, labels = pickled.array(atoms, b"data", (n, PIXELS)), pickled.numbers(atoms, key)
    if pixels is None:
        raise UserError(f"{where}: has no 'data' array of {n} x {PIXELS} bytes")
    if len(labels) != n or max(label.bit_length() for label in labels) > 31:
        raise UserError(f"{where}: has no list '{key.decode()}' of {n} whole numbers")
    return pixels, np.array(labels)
