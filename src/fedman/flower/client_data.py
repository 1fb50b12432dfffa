"""A client's own samples: an .npz file, or a folder of pictures with a sub-folder for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedman.data import image_folder
from fedman.data.dataset import check_samples
from fedman.data.images import holds_images, sample_shape
from fedman.data.npz import read_arrays
from fedman.errors import UserError
from fedman.flower.messages import SampleKind


def count(path: Path) -> int:
    """The number of samples, without decoding pictures."""
    return sum(len(files) for files in _classes(path).values()) if path.is_dir() else len(_arrays(path)[1])


def read(path: Path, wanted: SampleKind) -> tuple[np.ndarray, np.ndarray]:
    """Samples and labels, checked to have the run's shape, dtype and classes."""
    x, y = _pictures(path, wanted) if path.is_dir() else _arrays(path)
    images, shape = holds_images(x), sample_shape(x)
    if (images, shape) != (wanted.images, wanted.shape):
        kinds = {True: "images of bytes", False: "numbers"}
        raise UserError(
            f"{path}: holds {kinds[images]} of {shape}; the run wants {kinds[wanted.images]} of {wanted.shape}"
        )
    if y.dtype.kind in "iu" and not wanted.classes:
        raise UserError(f"{path}: has targets of whole numbers; the run wants floating-point numbers")
    if y.dtype.kind in "iu" and y.max() >= wanted.classes:
        raise UserError(f"{path}: has a label {y.max()}; the run's classes are 0 to {wanted.classes - 1}")
    return x, y


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """`x_train` and `y_train`, or `x` and `y`."""
    names, (x, y) = read_arrays(path, ("x_train", "y_train"), ("x", "y"))
    return check_samples(str(path), (names[0], names[1]), x, y)


def _classes(folder: Path) -> dict[str, list[Path]]:
    """The pictures of each class, sorted by name. Sub-folders are named by their class's number."""
    classes = image_folder.pictures(folder)
    seen: set[int] = set()
    for name in classes:
        if not image_folder.is_number(name) or int(name) in seen:
            raise UserError(f"{folder / name}: sub-folders are named by their class's number, 0, 1, ..., each once")
        seen.add(int(name))
    if not any(classes.values()):
        raise UserError(f"{folder}: no sub-folder of it holds pictures ({', '.join(image_folder.SUFFIXES)})")
    return classes


def _pictures(folder: Path, wanted: SampleKind) -> tuple[np.ndarray, np.ndarray]:
    """They must have the run's size; how to resize is not the client's decision."""
    modes = {channels: mode for mode, channels in image_folder.CHANNELS.items()}
    if not wanted.images or wanted.shape[0] not in modes:
        raise UserError(f"{folder}: holds pictures, but the run's samples are of shape {wanted.shape}")
    classes = _classes(folder)
    channels, height, width = wanted.shape
    return image_folder.decode(classes, {name: int(name) for name in classes}, (width, height), modes[channels])
