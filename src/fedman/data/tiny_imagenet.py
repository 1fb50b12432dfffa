"""Tiny-ImageNet-200 from its zip or the unpacked folder; decoded once, then read from a cache.

A class's number is its place among the sorted WordNet ids. The test set is the official validation set (the
official test images have no labels). JPEGs are decoded one after the other: at 70 µs an image two threads
were no faster than one (the images are too small for the decoder to release the interpreter lock for long).
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from threading import get_native_id

import numpy as np

from fedman.data import files, npz
from fedman.data.catalog import Progress, Spec, default_dir
from fedman.errors import UserError

TOP = "tiny-imagenet-200"
ANNOTATIONS = "val/val_annotations.txt"
TRAIN_IMAGE = re.compile(r"train/(n\d{8})/images/[\w.-]+\.JPEG")
VAL_IMAGE = re.compile(r"[\w.-]+\.JPEG")
MAX_JPEG = 1 << 20
MAX_TEXT = 1 << 24
CACHE_NAME = "tiny-imagenet.decoded.npz"


def read(spec: Spec, root: Path, progress: Progress | None = None) -> files.Arrays:
    """The images and labels under `root`, from the cache if it was made from the same files."""
    source = _find(spec, root)
    channels, height, width = spec.shape
    count, shape = spec.train + spec.test, (height, width, channels)
    key = hashlib.sha256(repr((spec.classes, count, shape)).encode())
    for name, info in sorted(source.stats()):
        key.update(f"{name}\0{info.st_size}\0{info.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    places = list(dict.fromkeys((root / CACHE_NAME, default_dir() / CACHE_NAME)))
    found = next((cached for place in places if (cached := _cached(place, key.digest()))), None)
    if found is None:
        names, numbers = _listing(spec, source)
        found = _decode(source, names, shape, progress), numbers
        _store(places, key.digest(), *found)
    images, labels = found[0], found[1].astype(np.int64)
    return images[: spec.train], labels[: spec.train], images[spec.train :], labels[spec.train :]


def _find(spec: Spec, root: Path) -> _Source:
    if (root / TOP).is_dir():
        return _Folder(root / TOP)
    if (root / f"{TOP}.zip").exists():
        return _Zip(root / f"{TOP}.zip")
    if (root / "train").is_dir() and (root / ANNOTATIONS).is_file():
        return _Folder(root)
    raise files.not_found(spec, root, [f"{TOP}/", f"{TOP}.zip"])


def _listing(spec: Spec, source: _Source) -> tuple[list[str], np.ndarray]:
    """The names of all images, training set first, and their labels."""
    matches = [match for name in source.names() if (match := TRAIN_IMAGE.fullmatch(name))]
    train = sorted((match[1], match[0]) for match in matches)
    ids = {wnid: label for label, wnid in enumerate(sorted({wnid for wnid, _ in train}))}
    if len(train) != spec.train or len(ids) != spec.classes:
        raise UserError(
            f"{source.path}: has {len(train)} training images of {len(ids)} classes, expected {spec.train} "
            f"of {spec.classes} (train/<WordNet id>/images/*.JPEG)"
        )
    val = _annotations(spec, source, ids)
    names = [name for _, name in train] + [f"val/images/{name}" for name in val]
    labels = [ids[wnid] for wnid, _ in train] + list(val.values())
    return names, np.array(labels, dtype=np.uint8)


def _annotations(spec: Spec, source: _Source, ids: dict[str, int]) -> dict[str, int]:
    """File name -> label of the validation images; lines read `val_0.JPEG <tab> n03444034 <tab> box`."""
    where = f"{source.path}: {ANNOTATIONS}"
    lines = source.read(ANNOTATIONS, MAX_TEXT).decode("utf-8", "replace").splitlines()
    labels: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if not VAL_IMAGE.fullmatch(name) or wnid not in ids or name in labels:
            raise UserError(f"{where}: line {number} is not 'file.JPEG<tab>known WordNet id', or names a file again")
        labels[name] = ids[wnid]
    if len(labels) != spec.test:
        raise UserError(f"{where}: has {len(labels)} lines, expected {spec.test}")
    return labels


def _decode(source: _Source, names: list[str], shape: tuple[int, int, int], progress: Progress | None) -> np.ndarray:
    """All images as uint8 [n, H, W, C]; grey ones get three equal channels."""
    from PIL import JpegImagePlugin, UnidentifiedImageError

    images = np.empty((len(names), *shape), np.uint8)
    for i, name in enumerate(names):
        data = source.read(name, MAX_JPEG)
        try:
            image = JpegImagePlugin.JpegImageFile(io.BytesIO(data))
            if image.size != shape[1::-1]:
                raise UserError(f"{source.path}: {name} is {image.size[0]}x{image.size[1]}, not {shape[1]}x{shape[0]}")
            rgb = image if image.mode == "RGB" else image.convert("RGB")
            images[i] = np.frombuffer(rgb.tobytes(), np.uint8).reshape(shape)
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise UserError(f"{source.path}: {name} is not a whole JPEG image ({error})") from error
        if progress and (i % 500 == 499 or i + 1 == len(names)):
            progress("decoding Tiny-ImageNet", i + 1, len(names))
    return images


def _cached(place: Path, key: bytes) -> tuple[np.ndarray, np.ndarray] | None:
    """Images and labels, if they are there, undamaged, and made from the files that `key` stands for."""
    try:
        _, (images, labels, made_from) = npz.read_arrays(place, ("images", "labels", "key"))
    except UserError:
        return None
    return (images, labels) if made_from.tobytes() == key else None


def _store(places: list[Path], key: bytes, images: np.ndarray, labels: np.ndarray) -> None:
    """Write the cache to the first place where that is possible; warn if there is none."""
    for place in places:
        staged = place.with_name(f"{place.name}.{get_native_id()}.tmp")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(staged, "wb") as file:
                np.savez(file, images=images, labels=labels, key=np.frombuffer(key, np.uint8))
            staged.replace(place)
            return
        except OSError as error:
            problem = f"{place}: the decoded images could not be cached ({error.strerror or error})"
        finally:
            staged.unlink(missing_ok=True)
    warnings.warn(problem, stacklevel=2)


class _Zip:
    """The official zip: files by their name below tiny-imagenet-200/.

    Members are looked up by exact name, so a name such as ../x is never used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def stats(self) -> list[tuple[str, os.stat_result]]:
        """What tells whether a file has changed."""
        return [(self.path.name, files.check_regular(self.path))]

    def names(self) -> list[str]:
        return list(self._open[1])

    def read(self, name: str, limit: int) -> bytes:
        archive, members = self._open
        member = members.get(name)
        if member is None:
            raise UserError(f"{self.path}: has no member {TOP}/{name}")
        if member.file_size > limit:
            raise UserError(f"{self.path}: member {name} has {member.file_size} bytes, at most {limit} allowed")
        try:
            return archive.read(member)
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
            raise UserError(f"{self.path}: member {name} cannot be unpacked ({error})") from error

    @cached_property
    def _open(self) -> tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]:
        try:
            archive = zipfile.ZipFile(self.path)
        except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
            raise UserError(f"{self.path}: is not a whole zip archive ({error})") from error
        members: dict[str, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            top, _, name = info.filename.removeprefix("./").partition("/")
            if top != TOP or not name or info.is_dir():
                continue
            if name in members:
                raise UserError(f"{self.path}: has member {info.filename[:80]!r} twice")
            members[name] = info
        return archive, members


class _Folder:
    """The same for the unpacked tree."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        return [name for name, _ in self.stats()]

    def read(self, name: str, limit: int) -> bytes:
        return bytes(files.read_plain(self.path / name, limit))

    def stats(self) -> Iterator[tuple[str, os.stat_result]]:
        """Of all files: much faster than decoding them."""
        for pattern in ("val", "val/images", "train/*/images"):
            for folder in filter(Path.is_dir, self.path.glob(pattern)):
                below = folder.relative_to(self.path).as_posix()
                with os.scandir(folder) as entries:
                    yield from ((f"{below}/{e.name}", e.stat()) for e in entries if e.is_file())


_Source = _Zip | _Folder
