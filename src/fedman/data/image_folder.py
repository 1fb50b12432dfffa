"""A folder of pictures: train/CLASS/*.png and test/CLASS/*.png (or val/CLASS), all of one size.

Classes are numbered in the order of their sorted names; names that are all numbers are sorted as numbers, so that
`10` comes after `9`. Pictures are grey if all of them are, and RGB otherwise.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedman.data import files
from fedman.data.images import is_deep
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
    for folder, half in ((path / "train", train), (tests[0], test)):
        for name, found in half.items():
            if not found:
                raise UserError(f"{folder / name}: holds no pictures ({', '.join(SUFFIXES)})")
            if name not in train:
                raise UserError(f"{folder / name}: is a class that {path / 'train'} does not have")
    numbers = {name: number for number, name in enumerate(train)}
    everything = [file for half in (train, test) for each in half.values() for file in each]
    size, mode = _common(everything)
    needed = len(everything) * size[0] * size[1] * CHANNELS[mode]
    if needed > MAX_BYTES:
        raise UserError(f"{path}: {len(everything)} pictures take {needed} bytes, at most {MAX_BYTES} are allowed")
    return *decode(train, numbers, size, mode), *decode(test, numbers, size, mode)


def pictures(folder: Path) -> dict[str, list[Path]]:
    """The files of each class, sorted by name; classes are sorted as they are numbered."""
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if all(is_number(entry.name) for entry in classes):
        classes.sort(key=lambda entry: int(entry.name))
    if not classes:
        raise UserError(f"{folder}: has no sub-folders, one for each class")
    return {entry.name: sorted(filter(_is_picture, entry.iterdir())) for entry in classes}


def _is_picture(file: Path) -> bool:
    """By its name. Hidden files, as macOS puts beside pictures, are none."""
    return file.suffix.lower() in SUFFIXES and not file.name.startswith(".")


def is_number(name: str) -> bool:
    """Whether a class is called by a number that a label can be."""
    return name.isascii() and name.isdigit() and len(name) < 10


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


def decode(
    classes: Mapping[str, Sequence[Path]], numbers: Mapping[str, int], size: tuple[int, int], mode: str
) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of this size as bytes [n, H, W, C], and their classes; grey and colour are converted into each other as
    `mode` says."""
    y = np.repeat([numbers[name] for name in classes], [len(found) for found in classes.values()])
    x = np.empty((len(y), size[1], size[0], CHANNELS[mode]), np.uint8)
    for i, file in enumerate(file for found in classes.values() for file in found):
        with _opened(file) as image:
            if image.size != size:
                raise UserError(f"{file}: is {image.size[0]}x{image.size[1]}, wanted is {size[0]}x{size[1]}")
            try:
                x[i] = np.asarray(image.convert(mode), np.uint8).reshape(x.shape[1:])
            except DAMAGED as error:
                raise UserError(f"{file}: is not a whole picture ({one_line(error, 80)})") from error
    return x, y


def _opened(file: Path) -> Any:
    """A picture whose header is read. More than a byte a value is refused: Pillow makes white of all above 255."""
    from PIL import Image

    files.check_regular(file)
    if file.stat().st_size > MAX_PICTURE:
        raise UserError(f"{file}: has {file.stat().st_size} bytes, at most {MAX_PICTURE} are allowed")
    try:
        image = Image.open(file, formats=FORMATS)
    except (*DAMAGED, Image.DecompressionBombError) as error:
        raise UserError(f"{file}: is not a whole picture ({one_line(error, 80)})") from error
    if is_deep(image.mode):
        image.close()
        raise UserError(f"{file}: has more than 8 bits a value (mode {image.mode}); make it 8 bits, or give arrays")
    return image
