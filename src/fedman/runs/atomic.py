"""Files written beside their place, synced and renamed, so that a reader sees all of a file or nothing.

A symbolic link in a file's place is replaced, never followed.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_native_id

from safetensors import SafetensorError

from fedman.errors import UserError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk, a missing or a read-only folder into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    except UnicodeEncodeError:
        raise UserError(f"{path}: cannot be written: a name or a value is not Unicode text") from None
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while serializing: I/O error: ").partition(" (os error")[0]
        raise UserError(f"{path}: cannot be written: {reason}") from None


def staged_name(path: Path) -> Path:
    """Where this thread prepares `path`: beside it, hidden."""
    return path.with_name(f".{path.name}.{get_native_id()}")


def left_behind(path: Path) -> Iterator[Path]:
    """Where processes that were killed have prepared `path`."""
    exact = re.compile(rf"\.{re.escape(path.name)}\.\d+")
    return (found for found in path.parent.glob(".*") if exact.fullmatch(found.name))


def refuse_link(folder: Path) -> None:
    """Refuse to write into a folder of ours that is a symbolic link: what lies elsewhere is not ours."""
    if folder.is_symlink():
        raise UserError(f"{folder}: is a symbolic link, which is not followed; remove it")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file under another name, then move it into place. Every file has the user's usual mode."""
    staged = staged_name(path)
    with writing(path):
        staged.unlink(missing_ok=True)
        try:
            usual = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            mode = stat.S_IMODE(os.fstat(usual).st_mode)
            os.close(usual)
            write(staged)  # may put another file in this place, with a mode of its own
            with open(staged, "rb") as file:
                os.fchmod(file.fileno(), mode)
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


def write_bytes(path: Path, content: bytes) -> None:
    """`write_whole` for bytes."""
    write_whole(path, lambda staged: staged.write_bytes(content))


def write_text(path: Path, text: str) -> None:
    """`write_whole` for a text."""
    with writing(path):
        content = text.encode()
    write_bytes(path, content)


def json_text(value: object) -> str:
    """The contents of a JSON file."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def write_json(path: Path, value: object) -> None:
    """`write_whole` for JSON."""
    write_text(path, json_text(value))


def toml_text(values: Mapping[str, object]) -> str:
    """Flat keys as TOML, whose scalars are those of JSON but for infinity."""
    texts = {k: "inf" if v == math.inf else json.dumps(v, ensure_ascii=False) for k, v in values.items()}
    return "".join(f"{key} = {text}\n" for key, text in texts.items())


def write_toml(path: Path, values: Mapping[str, object]) -> None:
    """`write_whole` for flat keys as TOML."""
    write_text(path, toml_text(values))
