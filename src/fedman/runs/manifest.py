"""`manifest.json` in a run's folder: the sha256 of each of its files.

    {"format": 1, "files": {"config.toml": "…", "rounds.jsonl": "…", …}, "sha256": "…"}

While a run is under way, the configuration alone is listed. Folders of earlier versions have no manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from typing_extensions import TypedDict

from fedman.errors import UserError
from fedman.runs import records
from fedman.runs.atomic import write_json
from fedman.runs.checksums import digest, sha256

MANIFEST = "manifest.json"
FORMAT = 1


class _Manifest(TypedDict):
    format: int
    files: dict[str, str]
    sha256: str  # the hash of all the above


def read(folder: Path) -> dict[str, str]:
    """The hashes by name of file; none where there is no manifest."""
    path = folder / MANIFEST
    if not path.exists():
        return {}
    found = records.read(_Manifest, path)
    if found["format"] != FORMAT:
        raise UserError(f"{path}: format {found['format']}, this version reads {FORMAT}")
    if found["sha256"] != digest(found) or any("/" in name or name == ".." for name in found["files"]):
        raise UserError(f"{path}: damaged (its checksum differs); without it, the files are read unchecked")
    return found["files"]


def write(folder: Path, files: Mapping[str, str]) -> None:
    """List these hashes and no others."""
    made = {"format": FORMAT, "files": dict(files)}
    write_json(folder / MANIFEST, made | {"sha256": digest(made)})


def add(folder: Path, name: str, content: bytes) -> None:
    """List one more file, which is written in between: `forget` it before."""
    if (folder / MANIFEST).exists():
        write(folder, read(folder) | {name: sha256(content)})


def forget(folder: Path, name: str) -> None:
    """Take a file from the list before it is replaced: a process killed in between leaves it unlisted, not wrong."""
    listed = read(folder)
    if listed.pop(name, None):
        write(folder, listed)


def content(path: Path) -> bytes:
    """The bytes of a file, which must be those listed in the manifest beside it, if there is one that lists it."""
    listed = read(path.parent)
    if path.name not in listed:
        return records.content(path)
    if not path.exists():
        raise UserError(f"{path}: is missing, though {MANIFEST} lists it")
    found = records.content(path)
    if sha256(found) != listed[path.name]:
        if read(path.parent) != listed:  # a run writes here
            return content(path)
        raise UserError(f"{path}: damaged (its sha256 is not the one in {MANIFEST})")
    return found
