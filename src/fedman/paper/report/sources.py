"""Everything a report is made from, found in one folder: results, run folders, flatness, measured costs, the theory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from typing_extensions import TypedDict

from fedman.errors import UserError
from fedman.paper.flatness import flatness_json
from fedman.paper.flatness.flatness_json import FlatnessRecord
from fedman.runs import records, results, tune
from fedman.runs.folder import SUMMARY
from fedman.runs.records import ResultRow, evaluated_on
from fedman.runs.tune import Tuning

FIELD = "field"  # the folder of the study of docs/field.md


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
class FieldSources:
    """What was found in folders named `field`, which the page shows apart."""

    rows: list[ResultRow] = field(default_factory=list)
    flatness: list[FlatnessRecord] = field(default_factory=list)
    tunings: list[Tuning] = field(default_factory=list)


@dataclass(frozen=True)
class Sources:
    """What was found. `notes` tell a reader what was left out; `unchecked` is what has no checksums."""

    rows: list[ResultRow]
    flatness: list[FlatnessRecord]
    costs: list[StepCost]
    theorems: list[Theorems]
    notes: list[str]
    unchecked: list[Path]
    field: FieldSources


def find(place: Path) -> Sources:
    """Read a results file, or a folder with results files (*.jsonl), run folders and measurements (flatness.json,
    cost.json, theory.json) in it.

    Of two results of one configuration the first file's is taken, and a note says so. Runs that were evaluated on
    samples held out, and not on the test set, are left out.
    """
    parts, other_inputs = _told_apart(results.parts(place))
    measured = {path: flatness_json.read(path) for path in flatness_json.find(place, "*flatness*.json")}
    costs = [step for path in sorted(place.rglob("*cost*.json")) for step in records.read(_Costs, path)["steps"]]
    theorems = [_theorems(path) for path in sorted(place.rglob("theory.json"))]
    of = {path: _of_field(path, place) for path in (*dict(parts), *measured, *place.rglob(f"*{tune.NAME}"))}
    rows, notes = _without_duplicates([part for part in parts if not of[part[0]]])
    fields_rows, more = _without_duplicates([part for part in parts if of[part[0]]])
    notes += [*more, *other_inputs, *_played_again(rows, fields_rows)]
    of_field = FieldSources(
        fields_rows,
        [record for path, record in measured.items() if of[path]],
        [tune.read(path) for path in sorted(of) if path.name.endswith(tune.NAME) and of[path]],
    )
    if not rows and not measured and not of_field.rows and not of_field.tunings:
        why = " ".join(notes) or f"it needs results (*.jsonl) or finished runs ({SUMMARY}) in it"
        raise UserError(f"{place}: nothing to report; {why}")
    unchecked = [path for source in {place: None, **dict(parts)} for path in results.unchecked(source)]
    unchecked += [path for path, record in measured.items() if "sha256" not in record]
    papers = [record for path, record in measured.items() if not of[path]]
    return Sources(rows, papers, costs, theorems, notes, unchecked, of_field)


def _told_apart(
    parts: list[tuple[Path, list[ResultRow]]],
) -> tuple[list[tuple[Path, list[ResultRow]]], list[str]]:
    """The runs, and notes. Runs with other data, or another module, of the user's own under one name are told apart by
    a part of its hash where they have one configuration. Where none have, as where each seed draws data of its own, a
    note says that they stand together."""
    notes = []
    for key, what in (("dataset", "data"), ("model", "modules")):
        hashes: dict[str, set[str]] = {}
        alike: dict[str, set[str]] = {}
        for row in (row for _, rows in parts for row in rows):
            if found := row.get("inputs", {}).get(key):
                hashes.setdefault(str(row["config"].get(key)), set()).add(found)
                alike.setdefault(results.identity(row), set()).add(found)
        double = {found for same in alike.values() if len(same) > 1 for found in same}
        for name in [name for name, several in hashes.items() if len(several) > 1]:
            if hashes[name] & double:
                parts = [(path, [_renamed(row, key, name) for row in rows]) for path, rows in parts]
            else:
                notes.append(f"{name}: runs with different {what} under this name stand together.")
    return parts, notes


def _renamed(row: ResultRow, key: str, name: str) -> ResultRow:
    found = row.get("inputs", {}).get(key)
    if not found or row["config"].get(key) != name:
        return row
    return cast(ResultRow, {**row, "config": {**row["config"], key: f"{name} {found[:6]}"}})


def _of_field(path: Path, place: Path) -> bool:
    """Whether a file is in a folder `field` of the place, or the place is that folder. What lies in a run's folder is
    of the runs."""
    folder = place if place.is_dir() else place.parent
    inside = folder.resolve().name, *path.relative_to(folder).parts[:-1]
    return path.is_file() and FIELD in inside and path.name != flatness_json.NAME


def _played_again(rows: list[ResultRow], fields_rows: list[ResultRow]) -> list[str]:
    known = {results.identity(row): results.outcome(row) for row in rows}
    both = [row for row in fields_rows if results.identity(row) in known]
    again = sum(known[results.identity(row)] != results.outcome(row) for row in both)
    which = "1 run was" if again == 1 else f"{again} runs were"
    return [f"{which} played again for the field, with another result, which its tables show."] if again else []


def _without_duplicates(parts: list[tuple[Path, list[ResultRow]]]) -> tuple[list[ResultRow], list[str]]:
    kept: dict[str, ResultRow] = {}
    notes = []
    held_out = 0
    for path, rows in parts:
        other = 0
        for row in rows:
            if evaluated_on(row["config"]) != "test":
                held_out += 1
                continue
            first = kept.setdefault(results.identity(row), row)
            other += results.outcome(first) != results.outcome(row)
        if other:
            runs = "run has" if other == 1 else "runs have"
            notes.append(f"{path.name}: {other} {runs} another result elsewhere, which is the one shown.")
    if held_out:
        runs = "run was" if held_out == 1 else "runs were"
        notes.append(f"{held_out} {runs} evaluated on samples held out from training, and not shown.")
    return sorted(kept.values(), key=results.order), notes


def _theorems(path: Path) -> Theorems:
    found = records.read(_Theory, path)["theorems"]
    if any(len(row) != len(found["header"]) for row in found["rows"]):
        raise UserError(f"{path}: theorems must have as many cells in every row as in the header")
    return found


class _Theory(TypedDict):
    theorems: Theorems


class _Costs(TypedDict):
    steps: list[StepCost]
