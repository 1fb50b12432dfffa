"""MNIST and Fashion-MNIST from IDX files, plain or gzipped, in torchvision's folders or others that are common.

An IDX file is a big-endian header (two zero bytes, 0x08 for uint8, the number of axes, the axes as uint32)
and the bytes.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from fedman.data import files
from fedman.data.catalog import Progress, Spec
from fedman.errors import UserError

STEMS = (("train-images", "train-labels"), ("t10k-images", "t10k-labels"))


def read(spec: Spec, root: Path, progress: Progress | None = None) -> files.Arrays:
    """The four files from the first folder that has any of them (torchvision's layout, or `root` itself)."""
    folders = [root / spec.folder, (root / spec.folder).parent, root / spec.name / "raw", root / spec.name, root]
    folder = next((f for f in folders if any(_find(f, s, 3) for s, _ in STEMS)), None)
    if folder is None:
        wanted = ", ".join(f"{images}-idx3-ubyte[.gz], {labels}-idx1-ubyte[.gz]" for images, labels in STEMS)
        where = ", ".join(f"{f.relative_to(root)}/" for f in folders[:-1])
        raise files.not_found(spec, root, [f"{wanted} in it or in {where}"])
    arrays: list[np.ndarray] = []
    channels, height, width = spec.shape
    for (images, labels), count in zip(STEMS, (spec.train, spec.test), strict=True):
        _, x = _load(folder, images, (count, height, width))
        path, y = _load(folder, labels, (count,))
        first = tuple(y[: len(spec.first_labels)].tolist())
        if images == "train-images" and first != spec.first_labels:  # names and sizes of files do not tell
            raise UserError(f"{path}: labels begin {first}, those of {spec.name} {spec.first_labels}: another data set")
        arrays += [x.reshape(count, height, width, channels), files.check_labels(str(path), y, spec.classes)]
    x_train, y_train, x_test, y_test = arrays
    return x_train, y_train, x_test, y_test


def _find(folder: Path, stem: str, axes: int) -> Path | None:
    names = (f"{stem}{dot}idx{axes}-ubyte{gz}" for dot in "-." for gz in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _load(folder: Path, stem: str, shape: tuple[int, ...]) -> tuple[Path, np.ndarray]:
    axes = len(shape)
    path = _find(folder, stem, axes)
    if path is None:
        raise UserError(f"{folder}: has no {stem}-idx{axes}-ubyte[.gz]")
    header = struct.pack(f">BBBB{axes}I", 0, 0, 8, axes, *shape)
    size = len(header) + int(np.prod(shape))
    data = files.read_gz(path, size) if path.suffix == ".gz" else files.read_plain(path, size)
    if data[: len(header)] != header:
        raise UserError(f"{path}: is not an IDX file of uint8 {shape} (it begins {data[: len(header)].hex()})")
    if len(data) != size:
        raise UserError(f"{path}: has {len(data)} bytes, expected {size}")
    return path, np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape)
