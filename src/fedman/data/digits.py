"""The embedded default: UCI optical digits, 1,797 real handwritten digits of 8x8 pixels (see DIGITS.md)."""

from __future__ import annotations

import gzip
from importlib import resources
from pathlib import Path

import numpy as np

from fedman.data.catalog import Progress, Spec
from fedman.data.files import Arrays

LEVELS = 16  # pixels are counts 0..16 of dark points in a 4x4 block


def read(spec: Spec, root: Path, progress: Progress | None = None) -> Arrays:
    """Pixels scaled to 0..255. The first 1,437 samples train, the last 360 test.

    The file is sorted by writer, so most test digits are by people who wrote no training digits. This is harder than
    a random split, in which every writer contributes to both sets.
    """
    text = gzip.decompress(resources.files("fedman.data").joinpath("digits.csv.gz").read_bytes()).decode("ascii")
    table = np.array(text.replace("\n", ",").rstrip(",").split(","), dtype=np.uint8).reshape(-1, 65)
    pixels, labels = table[:, :64].astype(np.float32), table[:, 64].astype(np.int64)
    images = np.rint(pixels * (255 / LEVELS)).astype(np.uint8).reshape(-1, 8, 8, 1)
    n = spec.train
    return images[:n], labels[:n], images[n:], labels[n:]
