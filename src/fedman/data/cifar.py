"""CIFAR-10 and CIFAR-100: binary and python distribution, each as the official .tar.gz or unpacked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedman.data import files, pickled
from fedman.data.catalog import Progress, Spec
from fedman.errors import UserError

PIXELS = 3 * 32 * 32
NAME_BYTES = 256  # room for a record's labels, file name and opcodes in the python distribution


@dataclass(frozen=True)
class Layout:
    """One distribution. `labels`: bytes of labels before each binary record (the last one counts), or the
    key of the labels in the pickled dictionary."""

    archive: str
    folder: str
    train: tuple[str, ...]
    test: str
    labels: int | bytes

    def counts(self, spec: Spec) -> dict[str, int]:
        """Records in each file, the test set last."""
        return {**dict.fromkeys(self.train, spec.train // len(self.train)), self.test: spec.test}

    def limits(self, spec: Spec) -> dict[str, int]:
        """The most bytes each file may have."""
        beside, once = (self.labels, 0) if isinstance(self.labels, int) else (NAME_BYTES, NAME_BYTES * 16)
        return {name: n * (PIXELS + beside) + once for name, n in self.counts(spec).items()}


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_BINARY_BATCHES = tuple(f"{name}.bin" for name in _BATCHES)
LAYOUTS = {
    10: (
        Layout("cifar-10-binary.tar.gz", "cifar-10-batches-bin", _BINARY_BATCHES, "test_batch.bin", 1),
        Layout("cifar-10-python.tar.gz", "cifar-10-batches-py", _BATCHES, "test_batch", b"labels"),
    ),
    100: (
        Layout("cifar-100-binary.tar.gz", "cifar-100-binary", ("train.bin",), "test.bin", 2),
        Layout("cifar-100-python.tar.gz", "cifar-100-python", ("train",), "test", b"fine_labels"),
    ),
}


def read(spec: Spec, root: Path, progress: Progress | None = None) -> files.Arrays:
    """The first distribution found: an unpacked folder before its archive, `root` itself last."""
    layouts = LAYOUTS[spec.classes]
    for layout in layouts:
        if (root / layout.folder).is_dir():
            return _arrays(spec, layout, files.read_folder(root / layout.folder, layout.limits(spec)))
        if (root / layout.archive).exists():
            return _arrays(spec, layout, files.read_tar_gz(root / layout.archive, layout.folder, layout.limits(spec)))
    for layout in layouts:
        if all((root / name).is_file() for name in (*layout.train, layout.test)):
            return _arrays(spec, layout, files.read_folder(root, layout.limits(spec)))
    raise files.not_found(spec, root, [name for x in layouts for name in (f"{x.folder}/", x.archive)])


def _arrays(spec: Spec, layout: Layout, content: list[files.Content]) -> files.Arrays:
    parts = []
    for n in layout.counts(spec).values():
        where, data = content.pop(0)
        if isinstance(layout.labels, int):
            x, y = _binary(where, data, n, layout.labels)
        else:
            x, y = _python(where, data, n, layout.labels)
        images = np.ascontiguousarray(x.reshape(n, 3, 32, 32).transpose(0, 2, 3, 1))
        parts.append((images, files.check_labels(where, y, spec.classes)))
    *train, test = parts
    xs, ys = zip(*train, strict=True)
    return np.concatenate(xs), np.concatenate(ys), *test


def _binary(where: str, data: bytes, n: int, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels `[n, PIXELS]`, one colour after the other, and labels."""
    record = label_bytes + PIXELS
    if len(data) != n * record:
        raise UserError(f"{where}: has {len(data)} bytes, expected {n * record} ({n} records of {record})")
    records = np.frombuffer(data, np.uint8).reshape(n, record)
    return records[:, label_bytes:], records[:, label_bytes - 1]


def _python(where: str, data: bytes, n: int, key: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The same from the python distribution."""
    atoms = pickled.read(data, where)
    pixels, labels = pickled.array(atoms, b"data", (n, PIXELS)), pickled.numbers(atoms, key)
    if pixels is None:
        raise UserError(f"{where}: has no 'data' array of {n} x {PIXELS} bytes")
    if len(labels) != n or max(label.bit_length() for label in labels) > 31:
        raise UserError(f"{where}: has no list '{key.decode()}' of {n} whole numbers")
    return pixels, np.array(labels)
