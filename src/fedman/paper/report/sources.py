"""Everything a report is made from, found in one folder: results, run folders, flatness, measured costs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedman.errors import UserError
from fedman.runs import results
from fedman.runs.folder import ROUNDS, SUMMARY, find_ended
from fedman.runs.records import ResultRow

DRAWN: dict[str, dict[str, tuple[int, ...]]] = {
    "top": {"values": (1,)},
    "trace": {"value": (0,)},
    "density": {"nodes": (2,), "weights": (2,)},
    "landscape": {"offsets": (1,), "losses": (1, 2)},
}
"""The parts of a flatness record that are drawn, and how deep their lists are nested."""


@dataclass(frozen=True)
class Sources:
    """What was found. `notes` tell a reader what was left out."""

    rows: list[ResultRow]
    flatness: list[dict[str, Any]] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find(place: Path) -> Sources:
    """Read a results file, or a folder with results files (*.jsonl), run folders, flatness.json and cost.json in it.

    Of two results of one configuration the first file's is taken, and a note says so.
    """
    if place.is_file():
        rows, notes = _once([(place, results.read(place))])
        return Sources(rows, notes=notes) if rows else _nothing(place)
    if not place.is_dir():
        raise UserError(f"{place}: no such file or folder")
    files = sorted(path for path in place.rglob("*.jsonl") if path.name != ROUNDS)
    parts = [(path, results.read(path)) for path in files]
    if find_ended(place):
        parts.append((place, results.collect([place])))
    flatness = [_flatness(path) for path in sorted(place.rglob("*flatness*.json"))]
    costs = [entry for path in sorted(place.rglob("*cost*.json")) for entry in _costs(path)]
    rows, notes = _once(parts)
    if not rows and not flatness:
        return _nothing(place)
    return Sources(rows, flatness, costs, notes)


def _nothing(place: Path) -> Sources:
    raise UserError(f"{place}: nothing to report; it needs results (*.jsonl) or finished runs ({SUMMARY}) in it")


def _once(parts: list[tuple[Path, list[ResultRow]]]) -> tuple[list[ResultRow], list[str]]:
    kept: dict[str, ResultRow] = {}
    notes = []
    for path, rows in parts:
        other = 0
        for row in rows:
            first = kept.setdefault(results.identity(row), row)
            other += results.outcome(first) != results.outcome(row)
        if other:
            notes.append(f"{path.name}: {other} runs have another result elsewhere, which is the one shown.")
    return sorted(kept.values(), key=results.order), notes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not a JSON file") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: a JSON object is needed")
    return value


def _flatness(path: Path) -> dict[str, Any]:
    """The measurements that `fedman flatness` made of one run."""
    record = _read_json(path)
    run, models = record.get("run"), record.get("models")
    if record.get("format") != 1 or not isinstance(run, dict) or not isinstance(models, dict):
        raise UserError(f"{path}: not measurements in format 1 of fedman flatness")
    for key, kind in (("dataset", str), ("partition", str), ("algorithm", str), ("zeta", (int, float)), ("seed", int)):
        if not isinstance(run.get(key), kind):
            raise UserError(f"{path}: run.{key} is missing or not of the right kind")
    if not isinstance(run.get("config", {}), dict):
        raise UserError(f"{path}: run.config is not an object")
    for name, measured in models.items():
        if not isinstance(measured, dict) or not all(isinstance(entry, dict) for entry in measured.values()):
            raise UserError(f"{path}: models.{name} must hold an object for each measurement")
        for entry, needs in DRAWN.items():
            for key, depth in needs.items():
                if entry in measured and not _numbers(measured[entry].get(key), depth):
                    raise UserError(f"{path}: models.{name}.{entry}.{key} is missing or not of the right kind")
    return record


def _numbers(value: Any, depth: tuple[int, ...]) -> bool:
    """Whether it is a number (null: not finite), or lists of them nested as deep as one of `depth` says."""
    if isinstance(value, list):
        inner = tuple(d - 1 for d in depth if d > 0)
        return bool(value) and bool(inner) and all(_numbers(v, inner) for v in value)
    return 0 in depth and (value is None or (isinstance(value, int | float) and not isinstance(value, bool)))


def _costs(path: Path) -> list[dict[str, Any]]:
    """Step times that benchmarks/man_cost.py wrote."""
    steps = _read_json(path).get("steps")
    fields: dict[str, Any] = {"where": str, "model": str, "kind": str, "ms": (int, float), "ratio": (int, float)}
    steps = steps if isinstance(steps, list) else [None]
    for entry in steps:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), t) for k, t in fields.items()):
            raise UserError(f"{path}: steps must be a list of objects with {', '.join(fields)}")
    return steps
