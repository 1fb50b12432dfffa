"""`flatness.json` in a run's folder: every measurement with how it was made, and all numbers its pictures need.

    {"format": 1, "run": {"method": …}, "models": {"all": {"top": {…}, "trace": {…}, …}, "sel": {…}}}

A measurement that is made again replaces the one before it; the others stay.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from fedman.errors import UserError
from fedman.runs.atomic import write_text

NAME = "flatness.json"
FORMAT = 1
DIGITS = 10


def read(folder: Path) -> dict[str, Any]:
    """What has been measured of a run."""
    path = folder / NAME
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; measure the run first: fedman flatness {folder}") from None
    except ValueError:
        raise UserError(f"{path}: not a JSON file") from None
    try:
        sound = record["format"] == FORMAT and isinstance(record["run"]["method"], str)
        sound = sound and all(isinstance(m, dict) for model in record["models"].values() for m in model.values())
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise UserError(f"{path}: not measurements in format {FORMAT}")
    return record


def add(folder: Path, run: dict[str, Any], model: str, name: str, result: dict[str, Any]) -> None:
    """Put one measurement of one model into the file."""
    record: dict[str, Any] = {"format": FORMAT, "run": run, "models": {}}
    if (folder / NAME).exists():
        record = read(folder)
    record["models"].setdefault(model, {})[name] = _plain(result)
    text = json.dumps(record, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda row: re.sub(r"\s+", " ", row[0]), text)  # a row of numbers is one line
    try:
        write_text(folder / NAME, text + "\n")
    except OSError as error:
        raise UserError(f"{folder / NAME}: cannot be written: {error.strerror or error}") from None


def _plain(value: Any) -> Any:
    """Numbers to so many digits; what is not finite becomes null, which any reader of JSON knows."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
