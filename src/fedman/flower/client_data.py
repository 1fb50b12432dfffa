"""A client's own samples: an .npz file, or a folder of pictures with a sub-folder for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedman.data.dataset import check_samples
from fedman.data.images import holds_images, sample_shape
from fedman.data.npz import read_arrays
from fedman.errors import UserError
from fedman.flower.messages import SampleKind

PICTURES = (".png", ".jpg", ".jpeg")
MODES = {1: "L", 3: "RGB"}


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
    if y.dtype.kind in "iu" and y.max() >= wanted.classes:
        raise UserError(f"{path}: has a label {y.max()}; the run's classes are 0 to {wanted.classes - 1}")
    return x, y


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """`x_train` and `y_train`, or `x` and `y`."""
    names, (x, y) = read_arrays(path, ("x_train", "y_train"), ("x", "y"))
    return check_samples(str(path), (names[0], names[1]), x, y)


def _classes(folder: Path) -> dict[int, list[Path]]:
    """The pictures of each class, sorted by name. Sub-folders are named by their class's number."""
    classes: dict[int, list[Path]] = {}
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            if not (entry.name.isascii() and entry.name.isdigit()) or int(entry.name) in classes:
                raise UserError(f"{entry}: sub-folders are named by their class's number, 0, 1, ..., each once")
            files = sorted(path for path in entry.iterdir() if path.suffix.lower() in PICTURES)
            classes[int(entry.name)] = files
    if not any(classes.values()):
        raise UserError(f"{folder}: no sub-folder of it holds pictures ({', '.join(PICTURES)})")
    return classes


def _pictures(folder: Path, wanted: SampleKind) -> tuple[np.ndarray, np.ndarray]:
    if not wanted.images or wanted.shape[0] not in MODES:
        raise UserError(f"{folder}: holds pictures, but the run's samples are of shape {wanted.shape}")
    classes = _classes(folder)
    x = np.stack([_decode(path, wanted.shape) for files in classes.values() for path in files])
    return x, np.repeat(np.array(list(classes), np.int64), [len(files) for files in classes.values()])


def _decode(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """One picture as bytes [H, W, C]. It must have the run's size; how to resize is not the client's decision."""
    from PIL import Image

    channels, height, width = shape
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            if image.size != (width, height):
                raise UserError(f"{path}: is {image.size[0]}x{image.size[1]}, the run wants {width}x{height}")
            return np.asarray(image.convert(MODES[channels]), np.uint8).reshape(height, width, channels)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: is not a whole picture ({error})") from None
