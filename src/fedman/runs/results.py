"""Finished runs as one compact file: a JSON line each, with the summary and a thinned accuracy curve."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import nan
from pathlib import Path

from fedman.errors import UserError
from fedman.runs.atomic import write_text, writing
from fedman.runs.folder import SUMMARY, RunFolder, find_ended
from fedman.runs.records import ResultRow, axes, check_row, decisive, read_row

POINTS = 100  # of a curve


def command(sources: Sequence[Path], out: Path, replace: bool) -> str:
    """`fedman results`: join the runs of `sources` and of an existing `out`, write them, say how many there are."""
    before = read(out) if out.exists() else []
    rows = join([(str(out), before), *((str(source), load(source)) for source in sources)], replace)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return f"{len(rows)} runs in {out}, {len(rows) - len(before)} of them new"


def load(source: Path) -> list[ResultRow]:
    """The runs of a results file, of a run's folder, or of a folder that holds runs."""
    return collect([source]) if source.is_dir() else read(source)


def collect(folders: Iterable[Path]) -> list[ResultRow]:
    """The finished and the diverged runs in these folders, in the order of their names."""
    folders = list(folders)
    runs = {run.path: run for folder in folders for run in find_ended(folder)}
    if not runs:
        raise UserError(f"{', '.join(map(str, folders))}: no finished run here (no {SUMMARY})")
    return [compact(runs[path]) for path in sorted(runs)]


def compact(run: RunFolder) -> ResultRow:
    """The row of an ended run. The place of its data is left out: it differs from machine to machine."""
    row = run.ending()
    if row is None:
        raise UserError(f"{run.path}: this run is not finished")
    row["config"].pop("data_dir", None)
    curve = [(r["round"], r["accuracy"]["all"]) for r in run.read_rounds() if "all" in r["accuracy"]]
    every = max(1, -(-len(curve) // POINTS))
    thin = curve[::-1][::every][::-1]  # keeps the end
    row["curve"] = {"round": [t for t, _ in thin], "all": [accuracy for _, accuracy in thin]}
    return check_row(row, str(run.diverged if "diverged" in row else run.summary))


def read(path: Path) -> list[ResultRow]:
    """The runs of a results file."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = list(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    return [read_row(line, f"{path}: line {number}") for number, line in enumerate(lines, 1)]


def join(parts: Iterable[tuple[str, Iterable[ResultRow]]], replace: bool = False) -> list[ResultRow]:
    """The runs of several named places, each configuration once, in a fixed order.

    Two outcomes of one configuration are an error that names the run, unless the later may `replace` the earlier.
    """
    kept: dict[str, tuple[str, ResultRow]] = {}
    for where, rows in parts:
        for row in rows:
            first_place, first = kept.setdefault(identity(row), (where, row))
            if outcome(first) == outcome(row):
                continue
            if not replace:
                raise UserError(f"{label(row)}: two results, {outcome_in_words(first)} in {first_place} and "
                                f"{outcome_in_words(row)} in {where}; add --replace to take the later")  # fmt: skip
            kept[identity(row)] = where, row
    return sorted((row for _, row in kept.values()), key=order)


def identity(row: ResultRow) -> str:
    """What decides a run's result, as a text."""
    return json.dumps(decisive(row["config"]), sort_keys=True)


def outcome(row: ResultRow) -> str:
    """The result of a run, as a text: two runs agree if it is the same."""
    keys = ("accuracy", "test_loss", "rounds_to_target", "diverged")
    return json.dumps({key: row.get(key) for key in keys}, sort_keys=True)


def outcome_in_words(row: ResultRow) -> str:
    """The accuracy of `all` (of `cloud`, where that is not kept), or that the run diverged."""
    if "diverged" in row:
        return "diverged"
    accuracy = row["accuracy"]
    return f"{accuracy.get('all', accuracy.get('cloud', nan)):.2f} %"


def order(row: ResultRow) -> tuple[str, str, str, float, int, str]:
    """By data set, partition, algorithm, ζ, seed."""
    c = axes(row)
    return c["dataset"], c["partition"], c["algorithm"], c["zeta"], c["seed"], identity(row)


def label(row: ResultRow) -> str:
    """A run in words: its data, method and seed."""
    c = axes(row)
    return f"{c['algorithm']} ζ={c['zeta']:g}, {c['dataset']} {c['partition']}, seed {c['seed']}"
