"""Files written beside their place, synced and renamed, so that a reader sees all of a file or nothing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from fedman.errors import UserError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk, a missing or a read-only folder into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while serializing: I/O error: ").partition(" (os error")[0]
        raise UserError(f"{path}: cannot be written: {reason}") from None


def staged_name(path: Path) -> Path:
    """Where this process prepares `path`: beside it, hidden."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file under another name, then move it into place."""
    staged = staged_name(path)
    with writing(path):
        try:
            write(staged)
            with open(staged, "rb") as file:
                os.fsync(file.fileno())
            os.replace(staged, path)
        finally:
            with suppress(OSError):
                staged.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: Path, text: str) -> None:
    """`write_whole` for a text."""
    write_whole(path, lambda staged: staged.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: object) -> None:
    """`write_whole` for JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_toml(path: Path, values: Mapping[str, object]) -> None:
    """`write_whole` for flat keys as TOML, whose scalars are those of JSON but for infinity."""
    texts = {k: "inf" if v == math.inf else json.dumps(v, ensure_ascii=False) for k, v in values.items()}
    write_text(path, "".join(f"{key} = {text}\n" for key, text in texts.items()))
