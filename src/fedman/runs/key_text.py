"""Keys as text: KEY=VALUE words of a command line, TOML files."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedman.errors import UserError, one_line, shown

MAX_BYTES = 1 << 20  # of a TOML file
MAX_DOTS = 2000  # in it


def overrides(words: Iterable[str]) -> dict[str, str]:
    """KEY=VALUE words of a command line as a mapping."""
    values: dict[str, str] = {}
    for word in words:
        key, sign, value = (part.strip() for part in word.partition("="))
        if not sign or not key:
            raise UserError(f"{shown(word)}: expected KEY=VALUE, as in zeta=0.15")
        if key in values:
            raise UserError(f"{key}: given twice, as {shown(values[key])} and {shown(value)}")
        values[key] = value
    return values


def read_toml(path: str | Path) -> dict[str, Any]:
    """The keys of a TOML file."""
    try:
        with open(path, "rb") as file:
            return parse_toml(file.read(MAX_BYTES + 1), path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def parse_toml(content: bytes, path: str | Path) -> dict[str, Any]:
    """The keys in the contents of a TOML file; `path` names it in errors."""
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: has more than {MAX_BYTES} bytes, which no configuration needs")
    if content.count(b".") > MAX_DOTS:  # of a dotted key, whose time grows with the square of its length
        raise UserError(f"{path}: has more than {MAX_DOTS} dots, which no configuration needs")
    try:
        values = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a TOML file: {one_line(error)}") from None
    tables = [key for key, value in values.items() if isinstance(value, dict)]
    if tables:
        raise UserError(f"{path}: keys are flat; [{tables[0]}] is a table")
    if "tensorboard" in values and values.pop("tensorboard"):  # the key of earlier versions
        values.setdefault("log", "tensorboard")
    return values
