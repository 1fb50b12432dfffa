"""Finished runs as one compact file: a JSON line each, the summary and the accuracy curve thinned to a few KB."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedman.errors import UserError
from fedman.records import read_rounds

POINTS = 100  # of a curve


def collect(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """The runs in these folders (each a run's own, or one that holds runs), in the order of their names."""
    runs = sorted({p.parent for folder in folders for p in folder.rglob("summary.json")})
    if not runs:
        raise UserError(f"{', '.join(map(str, folders))}: no finished run here (no summary.json)")
    return [compact(run) for run in runs]


def compact(folder: Path) -> dict[str, Any]:
    """One run. The place of its data is left out: it differs from machine to machine."""
    summary = json.loads((folder / "summary.json").read_bytes())
    summary["config"].pop("data_dir", None)
    curve = [(r["round"], r["accuracy"]["all"]) for r in read_rounds(folder / "rounds.jsonl") if "all" in r["accuracy"]]
    every = -(-len(curve) // POINTS)
    thin = curve[::-1][::every][::-1]
    return summary | {"curve": {"round": [t for t, _ in thin], "all": [a for _, a in thin]}}


def read(path: Path) -> list[dict[str, Any]]:
    """The runs of a results file."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise UserError(f"{path}: not a results file (a JSON object on every line)") from None
