"""A folder of pictures: train/CLASS/*.png and test/CLASS/*.png (or val/CLASS), all of one size.

Classes are numbered in the order of their sorted names. Pictures are grey if all of them are, and RGB otherwise.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fedman.data import files
from fedman.errors import UserError, one_line

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
CHANNELS = {"L": 1, "RGB": 3}
MAX_PICTURE = 64 << 20  # bytes of one file
MAX_BYTES = 16 << 30  # of all pictures, decoded
DAMAGED = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error, zlib.error)


def read(path: Path) -> files.Arrays:
    """The pictures of both sets as bytes [n, H, W, C], and their classes."""
    tests = [path / half for half in ("test", "val") if (path / half).is_dir()]
    if not (path / "train").is_dir() or not tests:
        raise UserError(f"{path}: has no folders train/ and test/ (or val/) of pictures")
    train, test = pictures(path / "train"), pictures(tests[0])
    for name in test:
        if name not in train:
            raise UserError(f"{tests[0] / name}: is a class that {path / 'train'} does not have")
    numbers = {name: number for number, name in enumerate(train)}
    everything = [file for half in (train, test) for each in half.values() for file in each]
    size, mode = _common(everything)
    needed = len(everything) * size[0] * size[1] * CHANNELS[mode]
    if needed > MAX_BYTES:
        raise UserError(f"{path}: {len(everything)} pictures take {needed} bytes, at most {MAX_BYTES} are allowed")
    x, y, x_test, y_test = (
        array
        for half in (train, test)
        for array in (
            np.stack([decode(file, size, mode) for each in half.values() for file in each]),
            np.repeat([numbers[name] for name in half], [len(each) for each in half.values()]),
        )
    )
    return x, y, x_test, y_test


def pictures(folder: Path) -> dict[str, list[Path]]:
    """The files of each class, all sorted by name."""
    found: dict[str, list[Path]] = {}
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            found[entry.name] = sorted(file for file in entry.iterdir() if file.suffix.lower() in SUFFIXES)
            if not found[entry.name]:
                raise UserError(f"{entry}: holds no pictures ({', '.join(SUFFIXES)})")
    if not found:
        raise UserError(f"{folder}: has no sub-folders, one for each class")
    return found


def _common(everything: list[Path]) -> tuple[tuple[int, int], str]:
    """The size of all pictures, and the mode that holds all of them, from the files' headers."""
    sizes: dict[tuple[int, int], Path] = {}
    modes = set()
    for file in everything:
        with _opened(file) as image:
            sizes.setdefault(image.size, file)
            modes.add(image.mode)
        if len(sizes) > 1:
            ((width, height), first), ((other_width, other_height), second) = sizes.items()
            raise UserError(f"{second}: is {other_width}x{other_height}, but {first} is {width}x{height}")
    return next(iter(sizes)), "L" if modes <= {"L", "1"} else "RGB"


def decode(file: Path, size: tuple[int, int], mode: str) -> np.ndarray:
    """One picture of this size as bytes [H, W, C]; grey and colour are converted into each other as `mode` says."""
    with _opened(file) as image:
        if image.size != size:
            raise UserError(f"{file}: is {image.size[0]}x{image.size[1]}, wanted is {size[0]}x{size[1]}")
        try:
            found = np.asarray(image.convert(mode), np.uint8)
        except DAMAGED as error:
            raise UserError(f"{file}: is not a whole picture ({one_line(error, 80)})") from error
    return found.reshape(size[1], size[0], CHANNELS[mode])


def _opened(file: Path) -> Any:
    from PIL import Image

    files.check_regular(file)
    if file.stat().st_size > MAX_PICTURE:
        raise UserError(f"{file}: has {file.stat().st_size} bytes, at most {MAX_PICTURE} are allowed")
    try:
        return Image.open(file, formats=FORMATS)
    except (*DAMAGED, Image.DecompressionBombError) as error:
        raise UserError(f"{file}: is not a whole picture ({one_line(error, 80)})") from error
