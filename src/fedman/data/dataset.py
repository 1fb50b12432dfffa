"""`Dataset`: samples with their labels and normalisation, loaded by name or made from a user's own arrays."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedman.data.catalog import IidOrder, Progress, default_dir, is_npz, lookup
from fedman.data.images import holds_images, sample_shape
from fedman.errors import UserError

MAX_CLASSES = 65_536
BLOCK = 1 << 17  # pixels counted at a time


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images are uint8 [n, H, W, C], normalised as (x/255 − mean)/std; float32 [n, ...] is used as it is."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    augment: bool = False
    iid: IidOrder = "shuffled"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample as a model sees it."""
        return sample_shape(self.x_train)


def load(name: str, data_dir: Path | str | None = None, progress: Progress | None = None) -> Dataset:
    """The data set `name` (see `fedman list`), read from files in `data_dir`; or a user's `npz:PATH`."""
    if is_npz(name):
        from fedman.data import npz

        return from_arrays(*npz.read(Path(name.removeprefix("npz:")).expanduser()), name=name)
    spec = lookup(name)
    root = Path(data_dir).expanduser() if data_dir else default_dir()
    reader = importlib.import_module(f"fedman.data.{spec.reader}")
    try:
        x_train, y_train, x_test, y_test = reader.read(spec, root, progress)
    except OSError as error:
        raise UserError(f"{error.filename or root}: cannot be read ({error.strerror or error})") from error
    facts = spec.classes, spec.mean, spec.std, spec.augment, spec.iid
    return Dataset(name, x_train, y_train, x_test, y_test, *facts)


def from_arrays(x_train: Any, y_train: Any, x_test: Any, y_test: Any, name: str = "custom") -> Dataset:
    """A user's own data, checked: anything that `np.asarray` takes (also torch tensors on the CPU).

    uint8 means pixels: [n, H, W], [n, H, W, C] or [n, C, H, W], normalised with the training set's mean and
    std per channel ([n, features] is scaled to [0, 1]). Other numbers become float32 and are used as they
    are. Labels are whole numbers from 0; the number of classes is the largest label + 1.
    """
    train, y_train = check_samples(name, ("x_train", "y_train"), x_train, y_train)
    test, y_test = check_samples(name, ("x_test", "y_test"), x_test, y_test)
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise UserError(
            f"{name}: x_train and x_test must hold samples of one kind, not {train.dtype} {train.shape[1:]} "
            f"and {test.dtype} {test.shape[1:]}"
        )
    classes = int(max(y_train.max(), y_test.max())) + 1
    if classes < 2:
        raise UserError(f"{name}: every label is 0; at least two classes are needed")
    mean, std = channel_statistics(train) if holds_images(train) else ((0.0,), (1.0,))
    return Dataset(name, train, y_train, test, y_test, classes, mean, std)


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of pixels / 255 for each channel of uint8 [n, H, W, C], exactly, from the histogram."""
    levels = np.arange(256) / 255
    mean, std = [], []
    pixels = images.reshape(-1, images.shape[-1])
    for c in range(pixels.shape[1]):
        blocks = (pixels[i : i + BLOCK, c] for i in range(0, len(pixels), BLOCK))  # bincount makes int64 of them
        weights = sum(np.bincount(block, minlength=256) for block in blocks) / len(pixels)
        mean.append(float(weights @ levels))
        std.append(float(np.sqrt(weights @ (levels - mean[-1]) ** 2)) or 1.0)
    return tuple(mean), tuple(std)


def _array(field: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{field} is not an array of numbers: {str(error).splitlines()[0]}") from error
    if array.dtype.kind not in "biuf":
        raise UserError(f"{field} has dtype {array.dtype}; allowed are real numbers")
    if array.size == 0:
        raise UserError(f"{field} is empty (shape {array.shape})")
    return array


def check_samples(where: str, names: tuple[str, str], x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Samples and their labels as a `Dataset` holds them; errors say `where` and which of the two `names`."""
    x, y = _inputs(f"{where}: {names[0]}", x), _labels(f"{where}: {names[1]}", y)
    if len(x) != len(y):
        raise UserError(f"{where}: {names[0]} has {len(x)} samples but {names[1]} has {len(y)} labels")
    return x, y


def _inputs(field: str, value: Any) -> np.ndarray:
    x = _array(field, value)
    if x.ndim < 2:
        raise UserError(f"{field} has shape {x.shape}; samples need at least two axes, [n, ...]")
    if holds_images(x):
        return _pixels(field, x)
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, dtype=np.float32)
    if not np.isfinite(x).all():
        bad = int(np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))[0])
        raise UserError(f"{field} has a value that is not finite in float32 (sample {bad})")
    return x


def _pixels(field: str, x: np.ndarray) -> np.ndarray:
    if x.ndim == 2:
        return x.astype(np.float32) / 255
    if x.ndim == 3:
        x = x[..., None]
    if x.ndim == 4 and x.shape[3] > 4 >= x.shape[1]:
        x = x.transpose(0, 2, 3, 1)
    if x.ndim != 4 or x.shape[3] > 4:
        raise UserError(f"{field} has shape {x.shape}; uint8 images are [n, H, W], [n, H, W, C] or [n, C, H, W]")
    return np.ascontiguousarray(x)


def _labels(field: str, value: Any) -> np.ndarray:
    y = _array(field, value)
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise UserError(f"{field} is {y.dtype} of shape {y.shape}; labels are whole numbers of shape [n]")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= MAX_CLASSES:
        raise UserError(f"{field} has labels {low} to {high}; allowed are 0 to {MAX_CLASSES - 1}")
    return y.astype(np.int64)
