"""A user's own .npz file: x_train, y_train, x_test, y_test, of which the first two may be called x and y; or x and y
alone, split 80/20 at random, classes one by one.

A file takes the memory of its arrays, which are at most a hundred times its own size or 64 MiB; making samples of them
takes as much again.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np

from fedman.errors import UserError, one_line

SPLIT = ("x_train", "y_train", "x_test", "y_test")
BESIDE = ("x", "y", "x_test", "y_test")
WHOLE = ("x", "y")
MAX_BYTES = 16 << 30  # of all arrays
MAX_RATIO, ALWAYS = 100, 64 << 20  # they may take so many times what the file has; so many bytes are always allowed
TEST_SHARE = 0.2
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
BAD_HEADER = (ValueError, KeyError, SyntaxError, TypeError, MemoryError, RecursionError, tokenize.TokenError)


def read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The four arrays of the file, as stored; their contents are checked by `from_arrays`."""
    wanted, arrays = read_arrays(path, SPLIT, BESIDE, WHOLE)
    if wanted == WHOLE:
        return _split(path, *arrays)
    x_train, y_train, x_test, y_test = arrays
    return x_train, y_train, x_test, y_test


def read_arrays(path: Path, *choices: tuple[str, ...]) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """The first of `choices` whose arrays are all in the file, and these arrays."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            names = [info.filename.removesuffix(".npy") for info in archive.infolist()]
            wanted = next((choice for choice in choices if set(choice) <= set(names)), None)
            if wanted is None:
                raise UserError(f"{path}: has {_some(names)}; wanted are {'; or '.join(map(', '.join, choices))}")
            if len(set(names)) != len(names):
                raise UserError(f"{path}: has an array twice ({_some(names)})")
            members = [found[name] for name in wanted]
            _check_size(path, sum(info.file_size for info in members))
            return wanted, [_array(path, archive, info) for info in members]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise UserError(f"{path}: is not a whole .npz file ({error})") from error


def _some(names: list[str]) -> str:
    shown = ", ".join(name[:20].encode("unicode_escape").decode() for name in names[:6]) or "no arrays"
    return shown + (", ..." if len(names) > 6 else "")


def _check_size(path: Path, size: int) -> None:
    """Refuse what is too large, and what was packed so densely that it cannot be samples."""
    if size > MAX_BYTES:
        raise UserError(f"{path}: its arrays take {size} bytes, at most {MAX_BYTES} are allowed")
    packed = path.stat().st_size
    if size > max(ALWAYS, MAX_RATIO * packed):
        most = f"at most {MAX_RATIO} times as many are allowed"
        raise UserError(f"{path}: {packed} bytes unpack to {size}, {most}; save it with np.savez if it is meant so")


def _array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """One array. Its header must agree with the member's size before memory is allocated for it."""
    where = f"{path}: {info.filename.removesuffix('.npy')}"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UserError(f"{where} is packed in a way that numpy never does")
    with archive.open(info) as file:
        try:
            shape, fortran, dtype = HEADERS[np.lib.format.read_magic(file)](file)
        except BAD_HEADER as error:
            raise UserError(f"{where} has no valid .npy header ({one_line(error, 80)})") from error
        if dtype.kind not in "biuf":
            raise UserError(f"{where} has dtype {str(dtype)[:40]}; allowed are real numbers (objects never are)")
        size = dtype.itemsize * math.prod(shape)
        if file.tell() + size != info.file_size or min(shape, default=0) < 0:
            raise UserError(f"{where} has shape {shape} but {info.file_size - file.tell()} bytes")
        data = np.empty(size, np.uint8)
        done = 0
        while part := file.read(1 << 20):  # to the end: there the checksum is verified
            done += len(part)
            if done > size:
                break
            data[done - len(part) : done] = np.frombuffer(part, np.uint8)
        if done != size:
            raise UserError(f"{where} has not as many bytes as its header says")
    return data.view(dtype).reshape(shape, order="F" if fortran else "C")


def _split(path: Path, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A random fifth of every class (rounded down), or of all samples if y holds no class labels, is the test set,
    always the same for the same file."""
    if 0 in (x.ndim, y.ndim) or len(x) != len(y):
        raise UserError(f"{path}: x of shape {x.shape} and y of shape {y.shape} are not samples with their targets")
    has_classes = y.ndim == 1 and y.dtype.kind != "f"
    group = y if has_classes else np.zeros(len(y), bool)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(y))
    order = order[np.argsort(group[order], kind="stable")]
    _, counts = np.unique(group, return_counts=True)
    rank = np.concatenate([np.arange(count) for count in counts]) if len(counts) else np.arange(0)
    is_test = rank < np.repeat((TEST_SHARE * counts).astype(int), counts)
    train, test = np.sort(order[~is_test]), np.sort(order[is_test])
    if not test.size:
        lacking = "no class has" if has_classes else "has not"
        raise UserError(f"{path}: {lacking} the {round(1 / TEST_SHARE)} samples that a test set needs; give x_test")
    return x[train], y[train], x[test], y[test]
