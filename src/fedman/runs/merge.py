"""Join sweeps that were run on several machines, or in several parts, into one folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from fedman.errors import UserError
from fedman.runs import manifest
from fedman.runs.atomic import staged_name
from fedman.runs.folder import CONFIG, DIVERGED, LOCK, SUMMARY, RunFolder, find_runs
from fedman.runs.manifest import MANIFEST
from fedman.runs.records import decisive, differing
from fedman.runs.results import not_checked, require_agreement


def merge_sweeps(sources: Sequence[Path], out: Path) -> str:
    """Copy the runs of `sources` to `out`, each once, and say how many.

    Of several copies of a run a finished one is taken, else the one with the most rounds; the finished ones must agree.
    If any two do not, or if a file is damaged, nothing is written.
    """
    found: dict[str, list[RunFolder]] = {}
    for source in [*([out] if out.is_dir() else []), *sources]:
        runs = find_runs(source, CONFIG, SUMMARY, DIVERGED, MANIFEST)
        if not runs and source != out:
            raise UserError(f"{source}: no run here (no {CONFIG})")
        for run in runs:
            name = source.name if run.path == source else run.path.relative_to(source).as_posix()
            found.setdefault(name, []).append(run)
    for runs in found.values():
        for run in runs:
            run.check()
            _refuse_links(run)
    chosen = {name: _choose(name, runs) for name, runs in found.items()}
    for name, run in chosen.items():
        place = RunFolder(out / name)
        if run.path != place.path:
            _copy(run, place)
        for other in found[name]:
            if other.path not in (run.path, place.path) and other.ending() is not None:
                _add_missing(other, place)
    done = sum(run.ending() is not None for run in chosen.values())
    double = sum(map(len, found.values())) - len(found)
    said = f"{len(found)} runs in {out}, {done} of them finished; {double} were there more than once"
    return said + not_checked(run.path for runs in found.values() for run in runs if not run.is_checked)


def _choose(name: str, runs: list[RunFolder]) -> RunFolder:
    """The best of several copies of one run."""
    configs = [decisive(run.read_config()) for run in runs]
    for run, config in zip(runs, configs, strict=True):
        if keys := differing(configs[0], config):
            raise UserError(f"{name}: {runs[0].path} and {run.path} hold different runs; {', '.join(keys)} differ")
    ended = [(run, ending) for run in runs if (ending := run.ending()) is not None]
    places = [(str(run.path), ending) for run, ending in ended]
    for place in places[1:]:
        require_agreement(name, places[0], place, "remove one")
    return ended[0][0] if ended else max(runs, key=lambda run: len(run.read_rounds()))


def _refuse_links(run: RunFolder) -> None:
    """Refuse symbolic links in a run's folder: what they lead to is no part of it, and would be copied."""
    for path in run.path.rglob("*"):
        if path.is_symlink():
            raise UserError(f"{path}: is a symbolic link, which is not followed; put the file itself there")


def _copy(run: RunFolder, place: RunFolder) -> None:
    """Copy all files, replacing the run at `place`: a reader sees a whole run or none."""
    staged = staged_name(place.path)
    try:
        place.path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(run.path, staged, ignore=shutil.ignore_patterns(LOCK))
        if place.path.exists():
            shutil.rmtree(place.path)
        os.replace(staged, place.path)
    except OSError as error:
        raise UserError(f"{place.path}: cannot copy {run.path}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _add_missing(run: RunFolder, place: RunFolder) -> None:
    """Copy the files that `place` lacks, such as what was measured of the run."""
    for path in run.path.iterdir():
        copy = place.path / path.name
        if path.is_file() and path.name not in (LOCK, MANIFEST) and not copy.exists():
            shutil.copy2(path, copy)
            manifest.add(place.path, path.name, copy.read_bytes())
