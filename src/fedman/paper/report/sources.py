"""Everything a report is made from, found in one folder: results, run folders, flatness, measured costs, the theory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from typing_extensions import TypedDict

from fedman.errors import UserError
from fedman.paper.flatness import flatness_json
from fedman.paper.flatness.flatness_json import FlatnessRecord
from fedman.runs import records, results
from fedman.runs.folder import ROUNDS, SUMMARY
from fedman.runs.records import ResultRow


class StepCost(TypedDict):
    """The time of a training step, as benchmarks/man_cost.py writes it."""

    where: str
    model: str
    kind: str
    ms: float
    ratio: float  # to the plain step of the same measurement


class Theorems(TypedDict):
    """The paper's statements as a table, as `fedman flatness --theory` writes it."""

    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Sources:
    """What was found. `notes` tell a reader what was left out; `unchecked` is what has no checksums."""

    rows: list[ResultRow]
    flatness: list[FlatnessRecord]
    costs: list[StepCost]
    theorems: list[Theorems]
    notes: list[str]
    unchecked: list[Path]


def find(place: Path) -> Sources:
    """Read a results file, or a folder with results files (*.jsonl), run folders and measurements (flatness.json,
    cost.json, theory.json) in it.

    Of two results of one configuration the first file's is taken, and a note says so.
    """
    if not place.exists():
        raise UserError(f"{place}: no such file or folder")
    files = [place] if place.is_file() else [path for path in sorted(place.rglob("*.jsonl")) if path.name != ROUNDS]
    parts = [(path, results.read(path)) for path in files]
    parts.append((place, results.collect(place)))
    measured = {path: flatness_json.read(path) for path in flatness_json.find(place, "*flatness*.json")}
    costs = [step for path in sorted(place.rglob("*cost*.json")) for step in _costs(path)]
    theorems = [_theorems(path) for path in sorted(place.rglob("theory.json"))]
    rows, notes = _without_duplicates(parts)
    if not rows and not measured:
        raise UserError(f"{place}: nothing to report; it needs results (*.jsonl) or finished runs ({SUMMARY}) in it")
    unchecked = [path for source in {place: None, **dict.fromkeys(files)} for path in results.unchecked(source)]
    unchecked += [path for path, record in measured.items() if "sha256" not in record]
    return Sources(rows, list(measured.values()), costs, theorems, notes, unchecked)


def _without_duplicates(parts: list[tuple[Path, list[ResultRow]]]) -> tuple[list[ResultRow], list[str]]:
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


def _costs(path: Path) -> list[StepCost]:
    return records.read(_Costs, path)["steps"]


def _theorems(path: Path) -> Theorems:
    found = records.read(_Theory, path)["theorems"]
    if any(len(row) != len(found["header"]) for row in found["rows"]):
        raise UserError(f"{path}: theorems must have as many cells in every row as in the header")
    return found


class _Theory(TypedDict):
    theorems: Theorems


class _Costs(TypedDict):
    steps: list[StepCost]
