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


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
LAYOUTS = {
    10: (
        Layout(
            "cifar-10-binary.tar.gz",
            "cifar-10-batches-bin",
            tuple(f"{name}.bin" for name in _BATCHES),
            "test_batch.bin",
            1,
        ),
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
            return _from_folder(spec, layout, root / layout.folder)
        if (root / layout.archive).exists():
            return _from_archive(spec, layout, root / layout.archive)
    for layout in layouts:
        if all((root / name).is_file() for name in (*layout.train, layout.test)):
            return _from_folder(spec, layout, root)
    raise files.not_found(spec, root, [name for x in layouts for name in (f"{x.folder}/", x.archive)])


def _counts(spec: Spec, layout: Layout) -> dict[str, int]:
    """Records in each file."""
    return {**dict.fromkeys(layout.train, spec.train // len(layout.train)), layout.test: spec.test}


def _limit(layout: Layout, records: int) -> int:
    """The most bytes a file of so many records may have."""
    if isinstance(layout.labels, int):
        return records * (PIXELS + layout.labels)
    return records * (PIXELS + NAME_BYTES) + NAME_BYTES * 16


def _from_folder(spec: Spec, layout: Layout, folder: Path) -> files.Arrays:
    counts = _counts(spec, layout)
    data = files.read_folder(folder, {name: _limit(layout, n) for name, n in counts.items()})
    return _arrays(spec, layout, {name: str(folder / name) for name in counts}, data)


def _from_archive(spec: Spec, layout: Layout, archive: Path) -> files.Arrays:
    members = {name: f"{layout.folder}/{name}" for name in _counts(spec, layout)}
    limits = {members[name]: _limit(layout, n) for name, n in _counts(spec, layout).items()}
    data = files.read_tar_gz(archive, limits)
    where = {name: f"{archive}: {member}" for name, member in members.items()}
    return _arrays(spec, layout, where, {name: data[member] for name, member in members.items()})


def _arrays(spec: Spec, layout: Layout, where: dict[str, str], data: dict[str, bytes]) -> files.Arrays:
    parts = {}
    for name, n in _counts(spec, layout).items():
        if isinstance(layout.labels, int):
            parts[name] = _binary(where[name], data.pop(name), n, layout.labels, spec.classes)
        else:
            parts[name] = _python(where[name], data.pop(name), n, layout.labels, spec.classes)
    x_test, y_test = parts.pop(layout.test)
    xs, ys = zip(*parts.values(), strict=True)
    return np.concatenate(xs), np.concatenate(ys), x_test, y_test


def _binary(where: str, data: bytes, n: int, label_bytes: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    record = label_bytes + PIXELS
    if len(data) != n * record:
        raise UserError(f"{where}: has {len(data)} bytes, expected {n * record} ({n} records of {record})")
    records = np.frombuffer(data, np.uint8).reshape(n, record)
    return _images(records[:, label_bytes:]), files.check_labels(where, records[:, label_bytes - 1], classes)


def _python(where: str, data: bytes, n: int, key: bytes, classes: int) -> tuple[np.ndarray, np.ndarray]:
    atoms = pickled.read(data, where)
    pixels, labels = pickled.array(atoms, b"data", (n, PIXELS)), pickled.numbers(atoms, key)
    if pixels is None:
        raise UserError(f"{where}: has no 'data' array of {n} x {PIXELS} bytes")
    if len(labels) != n or max(label.bit_length() for label in labels) > 31:
        raise UserError(f"{where}: has no list '{key.decode()}' of {n} whole numbers")
    return _images(pixels), files.check_labels(where, np.array(labels), classes)


def _images(rows: np.ndarray) -> np.ndarray:
    """Rows of three colour planes as [n, 32, 32, 3]."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
