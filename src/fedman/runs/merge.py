"""Join sweeps that were run on several machines, or in several parts, into one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedman.errors import UserError
from fedman.runs.folder import CONFIG, RunFolder, find_runs
from fedman.runs.records import decisive, differing
from fedman.runs.results import outcome, outcome_in_words


def merge_sweeps(sources: Sequence[Path], out: Path) -> str:
    """Copy the runs of `sources` to `out`, each once, and say how many.

    Of several copies of a run a finished one is taken, else the one with the most rounds; the finished ones must agree.
    If any two do not, nothing is written.
    """
    found: dict[str, list[RunFolder]] = {}
    for source in [*([out] if out.is_dir() else []), *sources]:
        runs = find_runs(source)
        if not runs and source != out:
            raise UserError(f"{source}: no run here (no {CONFIG})")
        for run in runs:
            name = source.name if run.path == source else run.path.relative_to(source).as_posix()
            found.setdefault(name, []).append(run)
    chosen = {name: _choose(name, runs) for name, runs in found.items()}
    for name, run in chosen.items():
        place = RunFolder(out / name)
        if run.path != place.path:
            run.copy_to(place)
        for other in found[name]:
            if other.path not in (run.path, place.path) and other.ending() is not None:
                other.add_missing_to(place)
    done = sum(run.ending() is not None for run in chosen.values())
    double = sum(map(len, found.values())) - len(found)
    return f"{len(found)} runs in {out}, {done} of them finished; {double} were there more than once"


def _choose(name: str, runs: list[RunFolder]) -> RunFolder:
    """The best of several copies of one run."""
    configs = [decisive(run.read_config()) for run in runs]
    for run, config in zip(runs, configs, strict=True):
        if keys := differing(configs[0], config):
            raise UserError(f"{name}: {runs[0].path} and {run.path} hold different runs; {', '.join(keys)} differ")
    ended = [(run, ending) for run in runs if (ending := run.ending()) is not None]
    for run, ending in ended[1:]:
        first, before = ended[0]
        if outcome(ending) != outcome(before):
            raise UserError(f"{name}: two results, {outcome_in_words(before)} in {first.path} and "
                            f"{outcome_in_words(ending)} in {run.path}; remove one")  # fmt: skip
    return ended[0][0] if ended else max(runs, key=lambda run: len(run.read_rounds()))
