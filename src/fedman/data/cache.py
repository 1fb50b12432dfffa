"""A cache of decoded images in one uint8 .npy file.

The file is one flat array: images, labels (one byte each), the key of what they were made from, and the
CRC-32 of all that. It is written beside its place, synced and renamed, so it is complete or absent; a file
with another key or a wrong checksum is ignored.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

KEY_BYTES = 32
CRC_BYTES = 4
HEADER_BYTES = 4096  # at most, in files written here


def load(path: Path, key: bytes, count: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | None:
    """Images [count, *shape] and labels stored under `key`; None if there is no valid file."""
    pixels = count * int(np.prod(shape))
    total = pixels + count + KEY_BYTES + CRC_BYTES
    try:
        if not total < path.stat().st_size < total + HEADER_BYTES:
            return None
        flat = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if flat.shape != (total,) or flat.dtype != np.uint8:
        return None
    body, crc = flat[:-CRC_BYTES], flat[-CRC_BYTES:].tobytes()
    if body[-KEY_BYTES:].tobytes() != key or zlib.crc32(body).to_bytes(CRC_BYTES, "little") != crc:
        return None
    return flat[:pixels].reshape(count, *shape), flat[pixels : pixels + count]


def save(path: Path, key: bytes, images: np.ndarray, labels: np.ndarray) -> None:
    """Write uint8 images and labels under `key`, replacing the file at `path`; may raise OSError."""
    parts: list[Any] = [images.reshape(-1).data, labels.astype(np.uint8).tobytes(), key]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    parts.append(crc.to_bytes(CRC_BYTES, "little"))
    header = {"descr": "|u1", "fortran_order": False, "shape": (sum(len(part) for part in parts),)}
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(staged, "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
