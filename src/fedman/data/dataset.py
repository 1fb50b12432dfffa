"""`Dataset`: samples with their targets and normalisation, loaded by name or made from a user's own arrays."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedman.data.catalog import PADDING, SCHEMES, IidOrder, Progress, default_dir, lookup, own_files
from fedman.data.client_indices import check_parts
from fedman.data.images import holds_images, sample_shape
from fedman.errors import UserError, one_line

MAX_CLASSES = 1 << 18  # also of a vocabulary
BLOCK = 1 << 17  # pixels counted at a time


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Training and test samples, and which of them belong to which client where the data says so.

    Inputs: images are uint8 [n, H, W, C], normalised as (x/255 − mean)/std; float32 [n, ...] is used as it is; int64
    [n, ...] are ids for an embedding or whole numbers to be used as they are, as `ids` says (None: ids if the model
    begins with an embedding).

    Targets: whole numbers [n] are class labels; whole numbers [n, T] ids of tokens (or 0 and 1), of which −1 does not
    count; float32 [n, ...] are numbers, and `classes` is 0.

    `parts`: the indices of each client's training samples, for the partition `natural`; `test_parts`: of each client's
    own test samples; `client_names`: how clients are called, in the same order.
    """

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
    parts: Sequence[np.ndarray] | None = None
    test_parts: Sequence[np.ndarray] | None = None
    client_names: Sequence[str] | None = None
    ids: bool | None = None

    def __post_init__(self) -> None:
        clients = None
        for field, samples in (("parts", len(self.y_train)), ("test_parts", len(self.y_test))):
            if (parts := getattr(self, field)) is not None:
                checked = check_parts(f"{self.name}: {field}", parts, samples, clients, self.client_names)
                object.__setattr__(self, field, checked)
                clients = len(checked)

    def __repr__(self) -> str:
        clients = "" if self.parts is None else f" of {len(self.parts)} clients"
        return f"Dataset({self.name!r}, {len(self.y_train)} + {len(self.y_test)} samples of {self.shape}{clients})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample as a model sees it."""
        return sample_shape(self.x_train)


def load(name: str | Path, data_dir: Path | str | None = None, progress: Progress | None = None) -> Dataset:
    """The data set `name` (see `fedman list`), read from files in `data_dir`; or a user's own files, as `npz:PATH`."""
    name = str(name)
    root = Path(data_dir).expanduser() if data_dir else default_dir()
    own = own_files(name)
    try:
        if own:
            scheme, root = own
            found = _reader(SCHEMES[scheme].reader).read(root)
            if isinstance(found, Dataset):
                return replace(found, name=name)
            x_train, y_train, x_test, y_test = found
            return from_arrays(x_train, y_train, x_test, y_test, name)
        spec = lookup(name)
        x_train, y_train, x_test, y_test, *clients = _reader(spec.reader).read(spec, root, progress)
    except OSError as error:
        raise UserError(f"{error.filename or root}: cannot be read ({error.strerror or error})") from error
    parts, test_parts, names = clients or (None, None, None)
    facts = spec.classes, spec.mean, spec.std, spec.augment, spec.iid
    return Dataset(name, x_train, y_train, x_test, y_test, *facts, parts, test_parts, names)


def _reader(module: str) -> Any:
    return importlib.import_module(f"fedman.data.{module}")


def from_arrays(
    x_train: Any,
    y_train: Any,
    x_test: Any,
    y_test: Any,
    name: str = "custom",
    *,
    parts: Any = None,
    test_parts: Any = None,
    client_names: Sequence[str] | None = None,
    ids: bool | None = None,
) -> Dataset:
    """A user's own data, checked: anything that `np.asarray` takes, and torch tensors.

    Inputs: uint8 means pixels: [n, H, W], [n, H, W, C] or [n, C, H, W], normalised with the training set's mean and
    std per channel. Other whole numbers, bytes [n, features] among them, stay whole (int64), all others become
    float32; both are used as they are.

    Targets: whole numbers [n] are classes from 0; the number of classes is the largest + 1. Whole numbers [n, T] are
    ids, −1 for positions that do not count; the vocabulary's size is the largest id + 1, among the inputs too if they
    have the targets' shape. Others become float32. What else a task wants of its targets, it checks itself.
    """
    train, y_train = check_samples(name, ("x_train", "y_train"), x_train, y_train)
    test, y_test = check_samples(name, ("x_test", "y_test"), x_test, y_test)
    check_kind(name, ("x_train", "x_test"), "samples", train, test)
    check_kind(name, ("y_train", "y_test"), "targets", y_train, y_test)
    mean, std = channel_statistics(train) if holds_images(train) else ((0.0,), (1.0,))
    classes = _classes(name, train, y_train, test, y_test)
    return Dataset(
        name,
        *(train, y_train, test, y_test),
        *(classes, mean, std),
        parts=parts,
        test_parts=test_parts,
        client_names=client_names,
        ids=ids,
    )


def check_kind(where: str, names: tuple[str, str], what: str, a: np.ndarray, b: np.ndarray) -> None:
    """Refuse two arrays whose rows differ in shape or dtype."""
    if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
        raise UserError(
            f"{where}: {names[0]} and {names[1]} must hold {what} of one kind, not {a.dtype} {a.shape[1:]} "
            f"and {b.dtype} {b.shape[1:]}"
        )


def _classes(name: str, train: np.ndarray, y_train: np.ndarray, test: np.ndarray, y_test: np.ndarray) -> int:
    """The number of classes, or of words; 0 where targets are no ids."""
    if y_train.dtype.kind == "f":
        return 0
    classes = int(max(y_train.max(), y_test.max())) + 1
    if y_train.ndim == 1 and classes < 2:
        raise UserError(f"{name}: every label is 0; at least two classes are needed")
    if y_train.ndim == 1 and y_train.min() > 0:
        warnings.warn(f"{name}: no training sample is of class 0; the classes are 0 to {classes - 1}", stacklevel=3)
    if train.dtype == np.int64 and train.shape == y_train.shape:
        classes = max(classes, int(max(train.max(), test.max())) + 1)
        if classes > MAX_CLASSES:
            raise UserError(f"{name}: has an id {classes - 1}; allowed are ids up to {MAX_CLASSES - 1}")
    return classes


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


def as_numpy(value: Any) -> np.ndarray:
    """The values as an array: of tensors on any device, detached, bfloat16 as float32; of objects that are numbers."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    array = np.asarray(value)
    return np.array(array.tolist()) if array.dtype == object else array


def _array(field: str, value: Any) -> np.ndarray:
    if np.ma.is_masked(value):
        raise UserError(f"{field} has masked values; fill them, or leave their samples out")
    try:
        array = as_numpy(value)
    except Exception as error:  # a user's object may raise anything
        why = one_line(error) or type(error).__name__
        raise UserError(f"{field} is not an array of numbers: {why}") from error
    if array.dtype.kind not in "biuf":
        hint = " (words are numbered by np.unique(words, return_inverse=True)[1])" if array.dtype.kind in "SU" else ""
        raise UserError(f"{field} has dtype {array.dtype}; allowed are real numbers{hint}")
    if array.size == 0:
        raise UserError(f"{field} is empty (shape {array.shape})")
    return array


def check_samples(where: str, names: tuple[str, str], x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Samples and their targets as a `Dataset` holds them; errors say `where` and which of the two `names`."""
    x, y = _inputs(f"{where}: {names[0]}", x), _targets(f"{where}: {names[1]}", y)
    if len(x) != len(y):
        raise UserError(f"{where}: {names[0]} has {len(x)} samples but {names[1]} has {len(y)} labels")
    return x, y


def _inputs(field: str, value: Any) -> np.ndarray:
    x = _array(field, value)
    if x.ndim < 2:
        raise UserError(f"{field} has shape {x.shape}; samples need at least two axes, [n, ...]")
    if holds_images(x):
        return _pixels(field, x)
    return _whole(field, x) if x.dtype.kind in "iu" else _numbers(field, x)


def _targets(field: str, value: Any) -> np.ndarray:
    y = _array(field, value)
    if y.ndim < 1:
        raise UserError(f"{field} has shape {y.shape}; targets need an axis, [n, ...]")
    if y.dtype.kind == "f":
        return _numbers(field, y)
    low, high = int(y.min()), int(y.max())
    lowest = 0 if y.ndim == 1 else PADDING
    if low < lowest or high >= MAX_CLASSES:
        hint = "numbers to regress on are floating-point" if y.ndim == 1 else f"{PADDING} is what does not count"
        raise UserError(f"{field} has labels {low} to {high}; allowed are {lowest} to {MAX_CLASSES - 1} ({hint})")
    return y.astype(np.int64)


def _numbers(field: str, x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, dtype=np.float32)
    if not np.isfinite(x).all():
        bad = int(np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))[0])
        raise UserError(f"{field} has a value that is not finite in float32 (sample {bad})")
    return x


def _whole(field: str, x: np.ndarray) -> np.ndarray:
    if int(x.max()) > np.iinfo(np.int64).max:
        raise UserError(f"{field} has {x.max()}; whole numbers must fit into int64")
    return np.ascontiguousarray(x, dtype=np.int64)


def _pixels(field: str, x: np.ndarray) -> np.ndarray:
    if x.ndim == 3:
        x = x[..., None]
    if x.ndim == 4 and x.shape[3] > 4 >= x.shape[1]:
        x = x.transpose(0, 2, 3, 1)
    if x.ndim != 4 or x.shape[3] > 4:
        raise UserError(f"{field} has shape {x.shape}; uint8 images are [n, H, W], [n, H, W, C] or [n, C, H, W]")
    return np.ascontiguousarray(x)
