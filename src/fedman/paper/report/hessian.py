"""Flatness as tables: the largest eigenvalue and the trace beside the paper's, layers, clients, every measurement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedman.paper import targets as paper
from fedman.paper.report.series import Setting, Variant, in_words, method_order, method_title, papers_variant
from fedman.paper.report.tables import NOTHING, Table, slug
from fedman.runs.text_tables import mean_std

RUN = ("dataset", "partition", "algorithm", "zeta", "seed")  # what tells a measured run from others
MODEL = "all"  # of a run's three models the one whose accuracy is reported


Entry = dict[str, Any]


@dataclass(frozen=True)
class Measured(Setting):
    """The measurements of one run's model `all` by name; a measurement may have been made on several sample counts."""

    seed: int
    entries: dict[str, list[Entry]]

    @property
    def label(self) -> str:
        """The method, and how its setting departs from the paper's."""
        return ", ".join(filter(None, (self.method, self.departs)))

    def best(self, name: str) -> Entry:
        """The measurement on most samples; empty where there is none."""
        return max(self.entries.get(name, []), key=samples, default={})

    def on(self, name: str, count: int) -> Entry:
        """The measurement on so many samples, the one with most eigenvalues if there are several."""
        found = [entry for entry in self.entries.get(name, []) if samples(entry) == count]
        return max(found, key=lambda entry: len(entry.get("values", [])), default={})

    def figure(self, name: str) -> float:
        """`top`: λ_max; `trace`: the trace; nan where it was not measured."""
        entry = self.best(name)
        value = entry.get("values", [None])[0] if name == "top" else entry.get("value")
        return math.nan if value is None else float(value)


def read(records: Sequence[dict[str, Any]]) -> list[Measured]:
    """The models `all` of these flatness records, in the paper's order; records of one run are put together."""
    found: dict[tuple[Any, ...], Measured] = {}
    for record in records:
        run, variant = {name: record["run"][name] for name in RUN}, _variant(record)
        for name, entry in record["models"].get(MODEL, {}).items():
            key = *run.values(), in_words(variant)
            measured = found.setdefault(key, Measured(variant=variant, entries={}, **run))
            measured.entries.setdefault(name, []).append(entry)
    return sorted(
        found.values(),
        key=lambda m: (m.dataset, m.partition, method_order(m.algorithm), m.departs, m.zeta, m.seed),
    )


def _variant(record: dict[str, Any]) -> Variant:
    """How the measured run departs from the paper's setting; files of earlier versions do not say."""
    run = record["run"]
    return papers_variant({**run["config"], **{name: run[name] for name in RUN}}) if "config" in run else ()


def samples(entry: Entry) -> int:
    """On how many training samples it was measured."""
    return int(entry.get("samples", 0))


def tables(measured: Sequence[Measured]) -> list[Table]:
    """λ_max and trace of every method, mean over seeds, with the paper's; a table a partition."""
    groups: dict[tuple[str, str], dict[tuple[str, float, str], list[Measured]]] = {}
    for m in measured:
        groups.setdefault((m.dataset, m.partition), {}).setdefault((m.algorithm, m.zeta, m.departs), []).append(m)
    return [_table(*key, list(members.values())) for key, members in groups.items()]


def _table(dataset: str, partition: str, groups: Sequence[Sequence[Measured]]) -> Table:
    header = ["method", "λ_max", "paper", "ratio", "trace", "paper", "ratio", "seeds"]
    rows: list[list[str]] = []
    tones: dict[tuple[int, int], str] = {}
    doubts = False
    for members in groups:
        printed = paper.sharpness(dataset, partition, members[0].algorithm, members[0].man)
        doubtful = printed is not None and bool(printed.doubt)
        doubts |= doubtful
        row = [members[0].label]
        for name, digits in (("top", 2), ("trace", 0)):
            values = [m.figure(name) for m in members if not math.isnan(m.figure(name))]
            theirs = getattr(printed, name) if printed else None
            tones[len(rows), len(row) + 1] = "quiet"
            row += [
                mean_std(values, digits),
                f"{theirs:.{digits}f}{'*' if doubtful else ''}" if theirs is not None else NOTHING,
                f"{np.mean(values) / theirs:.2f}" if theirs and values and not doubtful else NOTHING,
            ]
        rows.append([*row, str(len(members))])
    note = "* The paper's figure is a copy: FedASAM repeats FedAvg, FedDC has one column twice." if doubts else ""
    title = f"{paper.title(dataset)}, {paper.partition_title(partition)}: the Hessian"
    return Table(f"hessian-{slug(dataset)}-{slug(partition)}", title, header, rows, note, tones=tones)


def layers(measured: Sequence[Measured]) -> Table | None:
    """Each layer's own block beside the norm of what it is fed: the paper's mechanism, layer by layer."""
    rows = []
    for m in measured:
        for name, block in m.best("layers").get("blocks", {}).items():
            figures = [block.get("top"), block.get("trace", {}).get("value"), block.get("input_norm")]
            shown = [NOTHING if value is None else f"{value:.4g}" for value in figures]
            rows.append([m.partition, m.label, str(m.seed), name, *shown])
    header = ["partition", "method", "seed", "layer", "λ_max", "trace", "input norm"]
    return Table("hessian-layers", "The Hessian's blocks, layer by layer", header, rows, words=4) if rows else None


def clients(measured: Sequence[Measured]) -> Table | None:
    """The first step of the paper's argument: λ_max of the mean loss is at most the mean of the clients' λ_max."""
    rows = []
    for m in measured:
        entry = m.best("clients")
        if "top" in entry and "mean" in entry:
            each = [v for v in entry.get("clients", []) if v is not None]
            rest = [f"{min(each):.4g}", f"{max(each):.4g}"] if each else [NOTHING, NOTHING]
            rows.append([m.partition, m.label, str(m.seed), f"{entry['top']:.4g}", f"{entry['mean']:.4g}", *rest])
    header = ["partition", "method", "seed", "λ_max of the mean", "mean of clients' λ_max", "smallest", "largest"]
    return Table("hessian-clients", "λ_max of the clients", header, rows, words=3) if rows else None


def every(records: Sequence[dict[str, Any]]) -> Table | None:
    """All measurements of λ_max and trace: of every model of a run, on every number of samples."""
    rows = set()
    for record in records:
        run = record["run"]
        title = method_title(run["algorithm"], run["zeta"] > 0)
        words = [run["dataset"], run["partition"], title, in_words(_variant(record)), str(run["seed"])]
        for model, entries in record["models"].items():
            for name, what in (("top", "λ_max"), ("trace", "trace")):
                entry = entries.get(name, {})
                value = entry.get("values", [None])[0] if name == "top" else entry.get("value")
                if value is not None:
                    error = f"{entry['error']:.3g}" if entry.get("error") is not None else NOTHING
                    rows.add((*words, model, what, f"{value:.5g}", error, str(samples(entry) or NOTHING)))
    header = ["data", "partition", "method", "departs by", "seed", "model", "of the Hessian", "value",
              "standard error", "samples"]  # fmt: skip
    return (
        Table("hessian-every", "Every measurement", header, [list(r) for r in sorted(rows)], words=7) if rows else None
    )


def basis(measured: Sequence[Measured]) -> str:
    """What the Hessian is of, in words."""
    counts = {samples(m.best(name)) for m in measured for name in ("top", "trace") if m.best(name)}
    return f"Of the mean cross-entropy {said(counts)}, at the mean of all clients' last models."


def said(counts: Iterable[int]) -> str:
    """Sample counts in words."""
    known = " and ".join(f"{count:,}".replace(",", " ") for count in sorted(set(counts)) if count)
    return f"on {known} training samples" if known else "on training samples"


def drops(measured: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """Plain and MAN of the same algorithm, partition and seed in the paper's setting."""
    found = {(m.dataset, m.partition, m.algorithm, m.seed, m.man): m for m in measured if not m.variant}
    return [(m, found[*key[:4], True]) for key, m in found.items() if not m.man and (*key[:4], True) in found]
