"""Read files that may be damaged or hostile: members by exact name, bounded sizes, nothing written to disk."""

from __future__ import annotations

import gzip
import io
import os
import stat
import struct
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fedman.data.catalog import Spec
from fedman.errors import UserError

SLACK = 1 << 20  # bytes of other members (readme, label names) that an official tar may hold
MAX_MEMBERS = 1000

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""x_train, y_train, x_test, y_test: what each reader returns."""

Content = tuple[str, bytes]
"""A file's name for errors, and its bytes."""


def not_found(spec: Spec, root: Path, names: Iterable[str]) -> UserError:
    """The error for a data set that is not found: where and what was looked for, and how to get it."""
    return UserError(
        f"dataset {spec.name}: nothing found in data_dir {root} (looked for {', '.join(names)}); "
        f"`fedman data get {spec.name}` downloads it"
    )


def check_labels(where: str, labels: np.ndarray, classes: int) -> np.ndarray:
    """`labels` as int64 if each is a class number."""
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if bad.size:
        raise UserError(f"{where}: label {labels[bad[0]]} of record {bad[0]} is not in 0 to {classes - 1}")
    return labels.astype(np.int64)


def check_regular(path: Path) -> os.stat_result:
    """Refuse folders, pipes and devices."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise UserError(f"{path}: is not a regular file")
    return info


def read_plain(path: Path, limit: int) -> bytes:
    """All of a regular file, which may have at most `limit` bytes."""
    if not path.exists():
        raise UserError(f"{path}: is missing")
    size = check_regular(path).st_size
    if size > limit:
        raise UserError(f"{path}: has {size} bytes, at most {limit} are allowed")
    return path.read_bytes()


def read_gz(path: Path, limit: int, kind: str = "gzip file") -> bytes:
    """All that a .gz file unpacks to, which may be at most `limit` bytes; its checksum is verified."""
    check_regular(path)
    try:
        with gzip.open(path) as stream:
            data = stream.read(limit + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: is not a whole {kind} ({error})") from error
    if len(data) > limit:
        raise UserError(f"{path}: unpacks to more than the {limit} bytes allowed")
    return data


def read_folder(folder: Path, limits: Mapping[str, int]) -> list[Content]:
    """The files of a folder that `limits` names, each at most as long as it says."""
    return [(str(folder / name), read_plain(folder / name, limit)) for name, limit in limits.items()]


def read_tar_gz(path: Path, folder: str, limits: Mapping[str, int]) -> list[Content]:
    """The same for a folder in a .tar.gz. Whatever its headers claim, no more is unpacked than these files may hold."""
    limits = {f"{folder}/{name}": limit for name, limit in limits.items()}
    data = read_gz(path, sum(limits.values()) + SLACK, ".tar.gz archive")
    try:
        found = _members(path, data, limits)
    except tarfile.TarError as error:
        raise UserError(f"{path}: is not a whole .tar.gz archive ({error})") from error
    except (ValueError, LookupError, ArithmeticError, struct.error) as error:
        raise UserError(f"{path}: has a damaged tar header ({error})") from error
    for name in limits:
        if name not in found:
            raise UserError(f"{path}: has no member {name}")
    return [(f"{path}: {name}", found.pop(name)) for name in limits]


def _members(path: Path, data: bytes, limits: Mapping[str, int]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for count, member in enumerate(tar):
            name = member.name.removeprefix("./")
            if count >= MAX_MEMBERS:
                raise UserError(f"{path}: has more than {MAX_MEMBERS} members; this is another archive")
            if name not in limits:
                continue
            if name in found:
                raise UserError(f"{path}: has member {name} twice")
            if not member.isreg():
                raise UserError(f"{path}: member {name} is not a plain file")
            if member.size > limits[name]:
                raise UserError(f"{path}: member {name} has {member.size} bytes, at most {limits[name]} allowed")
            content = tar.extractfile(member)
            assert content is not None
            found[name] = content.read()
    return found
