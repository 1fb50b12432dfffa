"""What the tables of bad files share: how a file is spoilt, and what must then happen."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedman import data
from fedman.data import catalog
from fedman.errors import UserError

Files = dict[str, bytes]
Build = Callable[[Path], object]
Change = Callable[[Files], object]
BOMB = 64 << 20
ROOM = 16 << 20  # what a loader may take for the small data sets, bombs or not


SMALL: dict[str, dict[str, Any]] = {
    "cifar10": {"train": 10, "test": 4},
    "cifar100": {"train": 8, "test": 4},
    "tiny-imagenet": {"train": 6, "test": 3, "classes": 3, "shape": (3, 16, 16)},
    "mnist": {"train": 6, "test": 4},
    "fashion-mnist": {"train": 6, "test": 4},
}


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue with the counts of SMALL."""
    for name, facts in SMALL.items():
        monkeypatch.setitem(catalog.SPECS, name, replace(catalog.SPECS[name], **facts))


class Case(NamedTuple):
    """Files that `build` puts into a folder; the error must name `file` and say `says`."""

    file: str
    says: str
    build: Build


def keep(files: Files) -> None:
    """No change."""


def drop(name: str) -> Change:
    return lambda files: files.pop(name)


def put(name: str, content: bytes) -> Change:
    return lambda files: files.update({name: content})


def edit(name: str, change: Callable[[bytes], bytes]) -> Change:
    return lambda files: files.update({name: change(files[name])})


def move(name: str, to: str) -> Change:
    return lambda files: files.update({to: files.pop(name)})


def then(build: Build, *steps: Build) -> Build:
    """Several builders, one after the other."""
    return lambda root: [step(root) for step in (build, *steps)]


def spoil(file: str, change: Callable[[bytes], bytes]) -> Build:
    """A builder that changes the bytes of a file that is there."""
    return lambda root: (root / file).write_bytes(change((root / file).read_bytes()))


def flip(content: bytes, position: int, bit: int = 0) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << bit
    return bytes(changed)


class Bomb:
    """What a hostile pickle does: run a command as it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {os.environ['CANARY']}",)


class Sandbox:
    """A folder to build bad files in, and the check that they are refused well."""

    def __init__(self, folder: Path, default_dir: Path) -> None:
        self.folder, self.root, self.default_dir = folder, folder / "data", default_dir
        self.root.mkdir()

    def refuses(self, dataset: str, case: Case) -> None:
        """One line that names the file; bounded memory; nothing run, nothing written."""
        case.build(self.root)
        before = sorted(self.folder.rglob("*"))
        tracemalloc.start()
        try:
            with pytest.raises(UserError) as error:
                data.load(dataset, self.root)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        message = str(error.value)
        assert "\n" not in message
        assert case.file in message
        assert case.says in message
        assert len(message) < 400 + 2 * len(str(self.root))
        assert peak < ROOM
        assert sorted(self.folder.rglob("*")) == before, "something was written or run"
        assert not list(self.default_dir.iterdir())
