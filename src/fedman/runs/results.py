"""Finished runs as one compact file: a JSON line each, the summary and the accuracy curve thinned to a few KB."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from fedman.errors import UserError
from fedman.runs.folder import LOCAL, read_rounds, write_text

POINTS = 100  # of a curve
Row = dict[str, Any]


def command(sources: Sequence[Path], out: Path, replace: bool) -> str:
    """`fedman results`: join the runs of `sources` and of an existing `out`, write them, say how many there are."""
    before = read(out) if out.exists() else []
    rows = join([(str(out), before), *((str(source), load(source)) for source in sources)], replace)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}") from None
    return f"{len(rows)} runs in {out}, {len(rows) - len(before)} of them new"


def load(source: Path) -> list[Row]:
    """The runs of a results file, of a run's folder, or of a folder that holds runs."""
    return collect([source]) if source.is_dir() else read(source)


def collect(folders: Iterable[Path]) -> list[Row]:
    """The finished and the diverged runs in these folders, in the order of their names."""
    folders = list(folders)
    names = ("summary.json", "diverged.json")
    runs = sorted({path.parent for folder in folders for name in names for path in folder.rglob(name)})
    if not runs:
        raise UserError(f"{', '.join(map(str, folders))}: no finished run here (no summary.json)")
    return [compact(run) for run in runs]


def compact(folder: Path) -> Row:
    """One run. The place of its data is left out: it differs from machine to machine."""
    path = folder / "summary.json"
    path = path if path.exists() else folder / "diverged.json"
    try:
        about = json.loads(path.read_bytes())
    except ValueError:
        raise UserError(f"{path}: not JSON") from None
    curve = [
        (r["round"], r["accuracy"]["all"])
        for r in read_rounds(folder / "rounds.jsonl")
        if "all" in r.get("accuracy", {})
    ]
    every = -(-len(curve) // POINTS)
    thin = curve[::-1][::every][::-1] if curve else []
    row = check({**about, "curve": {"round": [t for t, _ in thin], "all": [a for _, a in thin]}}, str(path))
    row["config"].pop("data_dir", None)
    return row


def read(path: Path) -> list[Row]:
    """The runs of a results file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        where = f"{path}: line {number}"
        try:
            rows.append(check(json.loads(line), where))
        except (ValueError, RecursionError):
            raise UserError(f"{where}: not a results file (a JSON object on every line)") from None
    return rows


def check(row: Any, where: str) -> Row:
    """A run with all fields that tables and figures are made of; `where` names it in the message."""

    def need(holder: Any, key: str, kind: type | tuple[type, ...], name: str) -> Any:
        value = holder.get(key) if isinstance(holder, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, float) and not isfinite(value)):
            raise UserError(f"{where}: {name} is missing or not of the right kind")
        return value

    config = need(row, "config", dict, "config")
    for key in ("dataset", "partition", "algorithm"):
        need(config, key, str, f"config.{key}")
    for key in ("zeta", "seed", "rounds", "clients"):
        need(config, key, (int, float), f"config.{key}")
    curve = need(row, "curve", dict, "curve")
    rounds, values = need(curve, "round", list, "curve.round"), need(curve, "all", list, "curve.all")
    numbers = all(isinstance(v, int | float) and isfinite(v) for v in [*rounds, *values])
    if not numbers or len(rounds) != len(values):
        raise UserError(f"{where}: curve.round and curve.all must be lists of as many numbers")
    if "diverged" not in row:
        need(need(row, "accuracy", dict, "accuracy"), "all", (int, float), "accuracy.all")
        if row.get("rounds_to_target") is not None:
            need(row, "rounds_to_target", int, "rounds_to_target")
    return row


def join(parts: Iterable[tuple[str, Iterable[Row]]], replace: bool = False) -> list[Row]:
    """The runs of several named places, each configuration once, in a fixed order.

    Two outcomes of one configuration are an error that names the run, unless the later may `replace` the earlier.
    """
    kept: dict[str, tuple[str, Row]] = {}
    for where, rows in parts:
        for row in rows:
            before = kept.get(identity(row))
            if before is None or (replace and outcome(before[1]) != outcome(row)):
                kept[identity(row)] = where, row
            elif outcome(before[1]) != outcome(row):
                raise UserError(f"{label(row)}: two results, {reached(before[1])} in {before[0]} and {reached(row)} in "
                                f"{where}; add --replace to take the later")  # fmt: skip
    return sorted((row for _, row in kept.values()), key=order)


def identity(row: Row) -> str:
    """What decides a run's result, as a text."""
    return json.dumps({k: v for k, v in row["config"].items() if k not in LOCAL}, sort_keys=True)


def outcome(row: Row) -> tuple[Any, ...]:
    """What a run came to."""
    return tuple(row.get(key) for key in ("accuracy", "test_loss", "rounds_to_target", "diverged"))


def reached(row: Row) -> str:
    """The accuracy of `all`, or that there is none."""
    return "diverged" if "diverged" in row else f"{row['accuracy']['all']:.2f} %"


def order(row: Row) -> tuple[Any, ...]:
    """By data set, partition, algorithm, ζ, seed."""
    config = row["config"]
    return *(config[k] for k in ("dataset", "partition", "algorithm", "zeta", "seed")), identity(row)


def label(row: Row) -> str:
    """A run in words: its data, method and seed."""
    c = row["config"]
    return f"{c['algorithm']} ζ={c['zeta']:g}, {c['dataset']} {c['partition']}, seed {c['seed']}"
