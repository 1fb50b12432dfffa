"""Flatness as tables: the largest eigenvalue and the trace beside the paper's, layers, clients, every measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from fedman.paper import targets as paper
from fedman.paper.flatness.flatness_json import FlatnessRecord, Measurements, Number, entries
from fedman.paper.report.series import (
    MAN,
    Setting,
    method_order,
    papers_variant,
    penalty_of,
    penalty_order,
)
from fedman.paper.report.sources import Theorems
from fedman.paper.report.tables import BLANK, Table, Toned
from fedman.runs.records import Headline
from fedman.runs.text_tables import mean_std

MODEL = "all"  # of a run's three models the one whose accuracy is reported


@dataclass(frozen=True)
class Measured(Setting):
    """What was measured of one run's model `all`, in one file or several."""

    seed: int
    files: list[Measurements] = field(compare=False)

    @property
    def printed(self) -> paper.Sharpness | None:
        """The paper's figures for its method."""
        known = paper.sharpness(self.dataset, self.partition, self.algorithm, bool(self.penalty))
        return known if self.papers_method else None

    @property
    def label(self) -> str:
        """The method, and how its setting differs from the paper's."""
        return ", ".join(filter(None, (self.method, self.variant)))

    @cached_property
    def best(self) -> Measurements:
        """Of each measurement the one on most samples."""
        return best_of(self.files)

    @property
    def top(self) -> float:
        """λ_max; nan where it was not measured, or not finite."""
        value = self.best["top"]["values"][0] if "top" in self.best else None
        return math.nan if value is None else value

    @property
    def trace(self) -> float:
        """The trace; nan where it was not measured, or not finite."""
        value = self.best["trace"]["value"] if "trace" in self.best else None
        return math.nan if value is None else value


def best_of(files: Iterable[Measurements]) -> Measurements:
    """Of each measurement of a model, in several files, the one on most samples; of equals the first file's."""
    best: Measurements = {}
    for file in files:
        for name, entry in entries(file).items():
            if name not in best or entry.get("samples", 0) > entries(best)[name].get("samples", 0):
                entries(best)[name] = entry
    return best


def merge(records: Sequence[FlatnessRecord]) -> list[Measured]:
    """The models `all` of these records, in the paper's order; records of one run are put together."""
    found: dict[Measured, Measured] = {}
    for record in records:
        if MODEL in record["models"]:
            new = _measured(record)
            found.setdefault(new, new).files.append(record["models"][MODEL])
    return sorted(found.values(), key=_order)


def _measured(record: FlatnessRecord) -> Measured:
    """The run of a record, without its files; how it differs from the paper's is unknown for earlier versions."""
    run = record["run"]
    config = run.get("config", {})
    method = run["algorithm"], penalty_of({**config, "zeta": run["zeta"]}), run["zeta"]
    return Measured(run["dataset"], run["partition"], *method, papers_variant(config), run["seed"], [])


def by_place(measured: Iterable[Measured]) -> list[list[Measured]]:
    """The runs of each data set and partition, which tables, figures and claims are about."""
    return [list(members) for _, members in groupby(measured, lambda m: (m.dataset, m.partition))]


def by_setting(measured: Iterable[Measured]) -> list[list[Measured]]:
    """The seeds of each setting."""
    return [list(members) for _, members in groupby(measured, lambda m: (m.place, m.label, m.zeta))]


def tables(measured: Sequence[Measured]) -> list[Table]:
    """λ_max and trace of every method, mean over seeds, with the paper's; a table for each partition."""
    return [_table(members) for members in by_place(measured)]


def _table(measured: Sequence[Measured]) -> Table:
    header = ["method", "λ_max", "paper", "ratio", "trace", "paper", "ratio", "seeds"]
    rows = []
    for members in by_setting(measured):
        theirs = members[0].printed
        star = "*" if theirs and theirs.doubt else ""
        row, counts = [members[0].label], list[int]()
        for values, printed, digits in (
            ([m.top for m in members], theirs and theirs.top, 2),
            ([m.trace for m in members], theirs and theirs.trace, 0),
        ):
            finite = [value for value in values if not math.isnan(value)]
            counts.append(len(finite))
            row += [
                mean_std(finite, f".{digits}f"),
                Toned(f"{printed:.{digits}f}{star}" if printed is not None else BLANK, "quiet"),
                f"{np.mean(finite) / printed:.2f}" if printed and finite and not star else BLANK,
            ]
        seeds = " / ".join(dict.fromkeys(str(count) for count in counts if count))
        if seeds:
            rows.append([*row, seeds])
    doubts = any(cell.endswith("*") for row in rows for cell in row[1:])
    note = "* The paper's figure is a copy: FedASAM repeats FedAvg, FedDC has one column twice." if doubts else ""
    note += " Seeds: those of λ_max / of the trace." if any("/" in row[-1] for row in rows) else ""
    return Table(f"hessian-{measured[0].place_slug}", f"{measured[0].place}: the Hessian", header, rows, note.strip())


def layers(measured: Sequence[Measured]) -> Table:
    """Each layer's block of the Hessian beside the norm of the layer's input, which MAN lowers."""
    rows = []
    for members in by_setting(m for m in measured if "layers" in m.best):
        blocks = [m.best["layers"]["blocks"] for m in members]
        for name in dict.fromkeys(name for found in blocks for name in found):
            of = [found[name] for found in blocks if name in found]
            figures = [b["top"] for b in of], [b["trace"]["value"] for b in of], [b["input_norm"] for b in of]
            rows.append([*_heads(members), name, *map(_mean, figures)])
    header = ["partition", "method", "seeds", "layer", "λ_max", "trace", "input norm"]
    return Table("hessian-layers", "The Hessian's blocks, layer by layer", header, rows, words=4)


def clients(measured: Sequence[Measured]) -> Table:
    """The first step of the paper's argument: λ_max of the mean loss is at most the mean of the clients' λ_max."""
    rows = []
    for members in by_setting(m for m in measured if "clients" in m.best):
        of = [m.best["clients"] for m in members]
        each = [entry["clients"] for entry in of if entry["clients"]]
        figures = [e["top"] for e in of], [e["mean"] for e in of], list(map(min, each)), list(map(max, each))
        rows.append([*_heads(members), *map(_mean, figures)])
    header = ["partition", "method", "seeds", "λ_max of the mean", "mean of clients' λ_max", "smallest", "largest"]
    return Table("hessian-clients", "λ_max of the clients", header, rows, words=3)


def losses(measured: Sequence[Measured]) -> Table:
    """Training loss and gradient norm beside λ_max and trace: runs are compared that are not equally far trained."""
    rows = []
    for members in by_setting(m for m in measured if "loss" in m.best and m.best["loss"]["value"] is not None):
        of = [m.best["loss"] for m in members]
        rows.append(
            [
                *_heads(members),
                _mean([entry["value"] for entry in of], ".3f"),
                _mean([entry.get("gradient_norm") for entry in of], ".2f"),
                _mean([m.top for m in members], ".2f"),
                _mean([m.trace for m in members], ".0f"),
            ]
        )
    header = ["partition", "method", "seeds", "training loss", "gradient norm", "λ_max", "trace"]
    note = (
        "Of the mean cross-entropy alone: runs with MAN minimise another loss, so their gradient of this one is larger."
    )
    return Table("hessian-losses", "Where the models stand", header, rows, note, 3)


def all_measurements(records: Sequence[FlatnessRecord]) -> Table:
    """All measurements of λ_max and trace: of every model of a run, on every number of samples."""
    rows = set()
    for record in records:
        m = _measured(record)
        for model, file in record["models"].items():
            first = m.dataset, m.partition, m.method, m.variant, str(m.seed), model
            if "top" in file and (value := file["top"]["values"][0]) is not None:
                rows.add((*first, "λ_max", f"{value:.5g}", BLANK, str(file["top"].get("samples", BLANK))))
            if "trace" in file and (value := file["trace"]["value"]) is not None:
                error = file["trace"]["error"]
                shown = BLANK if error is None else f"{error:.3g}"
                rows.add((*first, "trace", f"{value:.5g}", shown, str(file["trace"].get("samples", BLANK))))
    header = ["data", "partition", "method", "changed", "seed", "model", "of the Hessian", "value", "standard error",
              "samples"]  # fmt: skip
    return Table("hessian-every", "Every measurement", header, sorted(rows), words=7)


def theory(found: Sequence[Theorems]) -> Table:
    """The paper's statements, as `fedman flatness --theory` evaluated them; of several files the first."""
    header, rows = (found[0]["header"], found[0]["rows"]) if found else ([], [])
    note = "On a CNN of 368 parameters and ten clients, float64; Proposition 1 on two small problems of five clients."
    return Table("theory", "The paper's statements", header, rows, note, len(header))


def basis(measured: Sequence[Measured], loss: str = "cross-entropy") -> str:
    """Which Hessian it is, in words."""
    on = samples_text(m.best for m in measured)
    return f"Hessian of the mean {loss} on {on}, at the mean of all clients' last models."


def samples_text(measured: Iterable[Measurements], names: Collection[str] = ("top", "trace")) -> str:
    """On how many samples something was measured: 10 000 and 50 000 training samples."""
    used = (entry for each in measured for name, entry in entries(each).items() if name in names)
    counts = sorted({entry["samples"] for entry in used if "samples" in entry})
    known = " and ".join(f"{count:,}".replace(",", " ") for count in counts)
    return f"{known} training samples" if known else "training samples"


def comparable(
    members: Sequence[Measured], name: str, read: Callable[[Measurements], list[Any]]
) -> tuple[dict[Measured, list[Any]], int]:
    """What is compared of each run, on one number of samples: the number that most runs have.

    Of several measurements of a run the longest is taken, and none where all are empty.
    """
    found: dict[int, dict[Measured, list[Any]]] = {}
    for m in members:
        for file in (file for file in m.files if name in file):
            drawn, runs = read(file), found.setdefault(entries(file)[name].get("samples", 0), {})
            if len(drawn) > len(runs.get(m, [])):
                runs[m] = drawn
    count = max(found, key=lambda n: (len(found[n]), n), default=0)
    return found.get(count, {}), count


def plain_and_penalised(measured: Sequence[Measured], penalty: str = MAN) -> list[tuple[Measured, Measured]]:
    """Runs of the same algorithm, partition and seed without and with a penalty, in the paper's setting."""
    found = {(m.dataset, m.partition, m.algorithm, m.seed, m.penalty): m for m in measured if not m.variant}
    keys = [key for key in found if not key[4] and (*key[:4], penalty) in found]
    return [(found[key], found[*key[:4], penalty]) for key in keys]


def _order(m: Measured) -> tuple[object, ...]:
    penalty = penalty_order(m.penalty)
    return m.dataset, m.partition, method_order(m.algorithm), m.algorithm, m.variant, penalty, m.zeta, m.seed


def _heads(members: Sequence[Measured]) -> list[str]:
    """Partition, method and seeds."""
    return [members[0].partition, members[0].label, ", ".join(str(m.seed) for m in members)]


def _mean(values: Sequence[Number], form: str = "") -> str:
    """Mean ± standard deviation of those that are known and finite; by default with four digits of the largest."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return mean_std(known, form or Headline("").form(*known))
