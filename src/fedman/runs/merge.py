"""Sweeps made on several machines, or in several sittings, joined into one folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedman.config import read_toml
from fedman.errors import UserError
from fedman.runs.folder import LOCAL, read_rounds
from fedman.runs.results import outcome, reached


def merge_sweeps(sources: Sequence[Path], out: Path) -> str:
    """Copy the runs of `sources` to `out`, each once, and say how many.

    Of a run that is there several times a finished one wins, else the one that got furthest; finished ones must
    agree. Nothing is written if any two do not.
    """
    found: dict[str, list[Path]] = {}
    for source in [*([out] if out.is_dir() else []), *sources]:
        runs = _runs(source)
        if not runs and source != out:
            raise UserError(f"{source}: no run here (no config.toml)")
        for name, folder in runs.items():
            found.setdefault(name, []).append(folder)
    chosen = {name: _choose(name, folders) for name, folders in found.items()}
    for name, folder in chosen.items():
        place = out / name
        if folder != place:
            _copy(folder, place)
        for other in found[name]:
            if other not in (folder, place) and _summary(other) is not None:
                _add_missing(other, place)
    done = sum(_summary(folder) is not None for folder in chosen.values())
    double = sum(len(folders) for folders in found.values()) - len(found)
    return f"{len(found)} runs in {out}, {done} of them finished; {double} were there more than once"


def _runs(source: Path) -> dict[str, Path]:
    """The run folders below `source`, by their names in it."""
    folders = sorted(path.parent for path in source.rglob("config.toml") if not path.parent.name.startswith("."))
    return {source.name if f == source else f.relative_to(source).as_posix(): f for f in folders}


def _choose(name: str, folders: list[Path]) -> Path:
    configs = [_decisive(folder) for folder in folders]
    for folder, config in zip(folders[1:], configs[1:], strict=True):
        differ = sorted(k for k in {*config, *configs[0]} if config.get(k) != configs[0].get(k))
        if differ:
            raise UserError(f"{name}: {folders[0]} and {folder} hold different runs; {', '.join(differ)} differ")
    finished = [(folder, about) for folder in folders if (about := _summary(folder)) is not None]
    for folder, about in finished[1:]:
        first, before = finished[0]
        if outcome(about) != outcome(before):
            raise UserError(f"{name}: two results, {reached(before)} in {first} and {reached(about)} in {folder}; "
                            "remove one")  # fmt: skip
    if finished:
        return finished[0][0]
    return max(folders, key=lambda folder: len(read_rounds(folder / "rounds.jsonl")))


def _decisive(folder: Path) -> dict[str, Any]:
    return {key: value for key, value in read_toml(folder / "config.toml").items() if key not in LOCAL}


def _summary(folder: Path) -> dict[str, Any] | None:
    """What a finished run left, or its note of divergence; None while there is work left."""
    for name in ("summary.json", "diverged.json"):
        path = folder / name
        if path.exists():
            try:
                return dict(json.loads(path.read_bytes()))
            except (ValueError, TypeError):
                raise UserError(f"{path}: not a summary of this program") from None
    return None


def _copy(folder: Path, place: Path) -> None:
    """Beside its place first, then renamed: a reader sees a whole run or none."""
    staged = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder, staged, ignore=shutil.ignore_patterns(".lock"))
        if place.exists():
            shutil.rmtree(place)
        os.replace(staged, place)
    except OSError as error:
        raise UserError(f"{place}: cannot copy {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _add_missing(other: Path, place: Path) -> None:
    """What was measured of the same run elsewhere, such as its flatness."""
    for path in other.iterdir():
        if path.is_file() and path.name != ".lock" and not (place / path.name).exists():
            shutil.copy2(path, place / path.name)
