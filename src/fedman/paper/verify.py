"""`fedman verify`: compare all files of runs, results and measurements with their checksums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedman.errors import UserError
from fedman.paper.flatness import flatness_json
from fedman.runs import results
from fedman.runs.folder import CONFIG, DIVERGED, ROUNDS, SUMMARY, RunFolder, find_runs
from fedman.runs.manifest import MANIFEST


@dataclass(frozen=True)
class Verified:
    """What was found: a text for a person, and a line for each damaged run or file."""

    text: str
    damaged: list[str]


def verify(places: Sequence[Path]) -> Verified:
    """Check every run, results file and `flatness.json` in these places. Damage in one does not hide that in others."""
    sound, unchecked, damaged = 0, list[Path](), list[str]()
    checks = [check for place in dict.fromkeys(places) for check in _checks(place)]
    for path, check in checks:
        try:
            if check():
                sound += 1
            else:
                unchecked.append(path)
        except UserError as error:
            damaged.append(str(error))
    if not checks:
        raise UserError(f"{', '.join(map(str, places))}: no runs, results or measurements here")
    total = f"{sound} of {len(checks)} runs and files are as they were written"
    return Verified(total + results.not_checked(unchecked), list(dict.fromkeys(damaged)))


def _checks(place: Path) -> list[tuple[Path, Callable[[], bool]]]:
    """For each run and each file in a place: read all of it, and say whether it had checksums."""
    if not place.exists():
        raise UserError(f"{place}: no such file or folder")
    if not place.is_dir():
        return [(place, partial(_results, place))]
    runs = find_runs(place, CONFIG, SUMMARY, DIVERGED, MANIFEST)
    rows = (path for path in sorted(place.rglob("*.jsonl")) if path.name != ROUNDS)
    return [
        *((run.path, partial(_run, run)) for run in runs),
        *((path, partial(_results, path)) for path in rows),
        *((path, partial(_flatness, path)) for path in flatness_json.find(place, "*flatness*.json")),
    ]


def _run(run: RunFolder) -> bool:
    return bool(run.check())


def _results(path: Path) -> bool:
    results.read(path)
    return not results.unchecked(path)


def _flatness(path: Path) -> bool:
    return "sha256" in flatness_json.read(path)
