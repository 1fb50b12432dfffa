"""Read files that may be damaged or hostile: members by exact name, bounded sizes, nothing written to disk."""

from __future__ import annotations

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
READ = 1 << 18  # bytes that are read, or unpacked, at a time
GZIP = 31  # what zlib calls the format, with its largest window

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""x_train, y_train, x_test, y_test: what each reader returns."""

Content = tuple[str, bytes | bytearray]
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


def read_plain(path: Path, limit: int) -> bytearray:
    """All of a regular file, which may have at most `limit` bytes."""
    if not path.exists():
        raise UserError(f"{path}: is missing")
    size = check_regular(path).st_size
    if size > limit:
        raise UserError(f"{path}: has {size} bytes, at most {limit} are allowed")
    data = bytearray(limit + 1 if size == 0 else size + 1)  # a file that claims no bytes may be one of /proc
    with open(path, "rb") as file:
        count = file.readinto(data)
    if count == len(data):
        raise UserError(f"{path}: has more bytes than it says, at most {limit} are allowed")
    del data[count:]
    return data


def read_gz(path: Path, limit: int, kind: str = "gzip file") -> bytearray:
    """All that a .gz file unpacks to, which may be at most `limit` bytes; its checksum is verified.

    What is unpacked is all the memory that this takes. The file itself is not larger than what it holds but for a few
    bytes, nor in many parts, so that nobody waits long for nothing.
    """
    size = check_regular(path).st_size
    if size > limit + limit // 1000 + SLACK:
        raise UserError(f"{path}: has {size} bytes, which is more than a {kind} of {limit} bytes needs")
    data, parts, member = bytearray(), 0, None
    try:
        with open(path, "rb") as file:
            while packed := file.read(READ):
                packed = packed.lstrip(b"\0") if member and member.eof else packed  # parts may be padded with zeros
                while packed:
                    if member is None or member.eof:
                        member, parts = zlib.decompressobj(GZIP), parts + 1
                        if parts > MAX_MEMBERS:
                            raise UserError(f"{path}: is in more than {MAX_MEMBERS} parts; this is another file")
                    data += member.decompress(packed, min(READ, limit + 1 - len(data)))
                    if len(data) > limit:
                        raise UserError(f"{path}: unpacks to more than the {limit} bytes allowed")
                    packed = member.unused_data.lstrip(b"\0") if member.eof else member.unconsumed_tail
    except zlib.error as error:
        raise UserError(f"{path}: is not a whole {kind} ({error})") from error
    if member is None or not member.eof:
        raise UserError(f"{path}: is not a whole {kind} (it ends too early)")
    return data


def read_folder(folder: Path, limits: Mapping[str, int]) -> list[Content]:
    """The files of a folder that `limits` names, each at most as long as it says."""
    return [(str(folder / name), read_plain(folder / name, limit)) for name, limit in limits.items()]


def read_tar_gz(path: Path, folder: str, limits: Mapping[str, int]) -> list[Content]:
    """The same for a folder in a .tar.gz. Whatever its headers claim, no more is unpacked than these files may hold."""
    limits = {f"{folder}/{name}": limit for name, limit in limits.items()}
    data = io.BytesIO(read_gz(path, sum(limits.values()) + SLACK, ".tar.gz archive"))
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


def _members(path: Path, data: io.BytesIO, limits: Mapping[str, int]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=data, mode="r:") as tar:
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
