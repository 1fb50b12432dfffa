"""Finished runs as one compact file: a JSON line each, with the summary and a thinned curve of its headline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedman.errors import UserError
from fedman.runs.atomic import write_text, writing
from fedman.runs.checksums import Chain, chained, is_summed
from fedman.runs.folder import DIVERGED, ROUNDS, SUMMARY, RunFolder, find_runs
from fedman.runs.manifest import MANIFEST
from fedman.runs.records import (
    ResultRow,
    Settings,
    axes,
    check_row,
    content,
    decisive,
    figures,
    headline,
    headline_curve,
    headline_of,
    is_explained,
    parse,
)

POINTS = 100  # of a curve


def command(sources: Sequence[Path], out: Path, replace: bool, committed: bool) -> str:
    """`fedman results`: join the runs of `sources` and of an existing `out`, write them, say how many there are.

    Runs whose code is in no commit and no release are named. If only `committed` ones are wanted, none is added.
    """
    before = read(out) if out.exists() else []
    found = [(str(source), load(source)) for source in sources]
    empty = ", ".join(source for source, runs in found if not runs)
    nothing = f"{empty}: no finished run here (no {SUMMARY})" if empty else ""
    if not any(runs for _, runs in found):
        raise UserError(nothing)
    rows = join([(str(out), before), *found], replace)
    new = [row for row in rows if not any(row is old for old in before)]
    if committed and (unknown := unexplained(new)):
        raise UserError(f"{out}: not written; {unknown}")
    unknown = unexplained(rows)
    old = not_checked(path for source in (*([out] if out.exists() else []), *sources) for path in unchecked(source))
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, chained(rows))
    added = len(rows) - len(before)
    replaced = f", {len(new) - added} replaced" if len(new) > added else ""
    told = f"{len(rows)} runs in {out}, {added} of them new{replaced}"
    return "\n".join(filter(None, (told, nothing, unknown))) + old


def unexplained(rows: Sequence[ResultRow]) -> str:
    """A line about the runs that no commit and no release explains; nothing if there are none."""
    found = [row for row in rows if not is_explained(row)]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"no commit has the code of {label(found[0])}{more}" if found else ""


def load(source: Path) -> list[ResultRow]:
    """The runs of a results file, of a run's folder, or of a folder that holds runs."""
    return collect(source) if source.is_dir() else read(source)


def parts(place: Path) -> list[tuple[Path, list[ResultRow]]]:
    """The runs of a results file, or of all results files and run folders in a folder, by place."""
    if not place.exists():
        raise UserError(f"{place}: no such file or folder")
    files = [place] if place.is_file() else [path for path in sorted(place.rglob("*.jsonl")) if path.name != ROUNDS]
    return [*((path, read(path)) for path in files), (place, collect(place))]


def collect(folder: Path) -> list[ResultRow]:
    """The finished and the diverged runs in a folder, in the order of their names."""
    return [compact(run, end) for run in _ended(folder) if (end := run.ending()) is not None]


def unchecked(source: Path) -> list[Path]:
    """What earlier versions wrote without checksums: the runs of a folder, or the results file itself."""
    if source.is_dir():
        return [run.path for run in _ended(source) if not run.is_checked]
    return [] if is_summed(content(source).splitlines()) else [source]


def not_checked(paths: Iterable[Path]) -> str:
    """A line about files without checksums, to be added to a message; nothing if there are none."""
    found = list(dict.fromkeys(map(str, paths)))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"\nnot checked, as earlier versions wrote no checksums: {found[0]}{more}" if found else ""


def _ended(folder: Path) -> list[RunFolder]:
    return find_runs(folder, SUMMARY, DIVERGED, MANIFEST)


def compact(run: RunFolder, row: ResultRow) -> ResultRow:
    """The row of an ended run. The place of its data is left out: it differs from machine to machine."""
    row["config"].pop("data_dir", None)
    curve = headline_curve(run.read_rounds(), headline_of(row).name)
    every = max(1, -(-len(curve) // POINTS))
    thin = curve[::-1][::every][::-1]  # keeps the end
    row["curve"] = {"round": [t for t, _ in thin], "all": [value for _, value in thin]}
    return check_row(row, str(run.diverged if "diverged" in row else run.summary))


def read(path: Path) -> list[ResultRow]:
    """The runs of a results file."""
    lines = content(path).splitlines()
    if not lines:
        raise UserError(f"{path}: is empty; a results file has a JSON object on every line")
    chain = Chain(len(lines)) if is_summed(lines) else None
    rows = []
    for number, line in enumerate(lines, 1):
        where = f"{path}: line {number}"
        text = chain.content(line, where) if chain else line
        rows.append(check_row(parse(text, where, "a results file (a JSON object on every line)"), where))
    return rows


def join(parts: Iterable[tuple[str, Iterable[ResultRow]]], replace: bool = False) -> list[ResultRow]:
    """The runs of several named places, each configuration once, in a fixed order.

    Two outcomes of one configuration are an error that names the run, unless the later may `replace` the earlier; it
    then also replaces an equal one that no commit explains, if a commit explains it.
    """
    kept: dict[str, tuple[str, ResultRow]] = {}
    for where, rows in parts:
        for row in rows:
            first = kept.setdefault(identity(row), (where, row))
            if not replace:
                require_agreement(label(row), first, (where, row), "add --replace to take the later")
            elif outcome(first[1]) != outcome(row) or is_explained(row) > is_explained(first[1]):
                kept[identity(row)] = where, row
    return sorted((row for _, row in kept.values()), key=order)


def identity(row: ResultRow) -> str:
    """What decides a run's result, as a text: its configuration, with the precision that was used."""
    return settings_identity(row["config"] | ({"precision": row["precision"]} if "precision" in row else {}))


def settings_identity(settings: Settings) -> str:
    """The same of a configuration."""
    return json.dumps(decisive(settings), sort_keys=True)


def outcome(row: ResultRow) -> str:
    """The result of a run, as a text: two runs agree if it is the same."""
    keys = ("test_loss", "rounds_to_target", "diverged")
    return json.dumps({**figures(row), **{key: row.get(key) for key in keys}}, sort_keys=True)


def require_agreement(name: str, one: tuple[str, ResultRow], other: tuple[str, ResultRow], advice: str) -> None:
    """Refuse two outcomes of one run; each comes with the place where it was found."""
    if outcome(one[1]) == outcome(other[1]):
        return
    first, second = (
        f"{'diverged' if 'diverged' in row else headline_of(row).shown(headline(row))} in {where}"
        for where, row in (one, other)
    )
    inputs, others = (row.get("inputs", {}) for _, row in (one, other))
    if any(inputs[key] != others.get(key, inputs[key]) for key in inputs):
        advice = "they had different data or modules of your own under one name; keep them in different files"
    raise UserError(f"{name}: two results, {first} and {second}; {advice}")


def order(row: ResultRow) -> tuple[str, str, str, float, int, str]:
    """By data set, partition, algorithm, ζ, seed."""
    c = axes(row)
    return c["dataset"], c["partition"], c["algorithm"], c["zeta"], c["seed"], identity(row)


def label(row: ResultRow) -> str:
    """A run in words: its data, method and seed."""
    c = axes(row)
    return f"{c['algorithm']} ζ={c['zeta']:g}, {c['dataset']} {c['partition']}, seed {c['seed']}"
