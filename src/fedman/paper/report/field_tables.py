"""Tables of the field: tuned beside default, ranked, with and without MAN; penalties against MAN; what was tried."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from fedman.paper import targets as paper
from fedman.paper.presets import PARTITIONS, TUNED, ZETA
from fedman.paper.report.field import DATASET, PLACE, PLAIN, Field, Study, method_of, series_text
from fedman.paper.report.field_sharpness import mean_measure, of_seeds
from fedman.paper.report.series import (
    MAN,
    Series,
    common_seeds_text,
    gained,
    method_title,
    part_title,
    penalty_order,
    position,
)
from fedman.paper.report.tables import BLANK, Table, gain_text, rounds_text, unexplained
from fedman.runs.tune import Tried


def ranking(data: Field) -> Table:
    """Every method on the partition it was tuned on, the best first."""
    target = next((s.target for c in (*data.tuned.cells, *data.default.cells) if (s := c.series).target), None)
    header = ["rank", "method", "tuned", "default", "tuning adds", "chosen", f"rounds to {target or 50:g} %", "s",
              "λ_max", "trace"]  # fmt: skip
    rows, adds = [], data.tuning_gains()
    means = [c.series.mean for c in data.tuned.of(PLACE) if math.isfinite(c.series.mean)]
    for method in data.ranked:
        tuned = data.get(data.tuned, method)
        text = data.accuracy(data.tuned, method), data.accuracy(data.default, method)
        tuned = tuned if tuned and math.isfinite(tuned.mean) else None
        rows.append(
            [
                str(1 + sum(mean > tuned.mean + 1e-9 for mean in means)) if tuned else BLANK,
                method_title(*method),
                *text,
                gain_text(adds.get(method)),
                setting_text(data.choices.get(method)),
                rounds_text(tuned) if tuned else BLANK,
                _seconds(tuned),
                mean_measure(data, tuned, "hessian", ".2f"),
                mean_measure(data, tuned, "trace", ".0f"),
            ]
        )
    note = (
        f"Accuracy of the mean of all clients in %, {_seeds(data.tuned)}, ζ = {ZETA[DATASET]:g}. Settings were "
        "chosen among six for each method, on training samples held out. Tuning adds: over the seeds that both have, "
        f"{common_seeds_text(data.tuning_pairs())}. s: seconds a run, stacked with others. λ_max and trace: of the "
        f"mean cross-entropy on {data.samples('top', 'trace')}, at the tuned models{of_seeds(data)}. diverged: with "
        f"one seed or more, or with every setting that was tried. –: not measured, or diverged. {unexplained(rows)}"
    )
    title = f"CIFAR-100, {paper.partition_title(PLACE)}: the field"
    return Table("field-ranking", title, header, rows, note.strip(), 2)


def partitions(data: Field) -> Table:
    """Tuned beside default on every partition."""
    header = ["method", *(f"{paper.partition_title(p)}, {how}" for p in PARTITIONS for how in ("tuned", "default"))]
    rows = []
    for method in data.ranked:
        found = [data.accuracy(study, method, p) for p in PARTITIONS for study in (data.tuned, data.default)]
        rows.append([method_title(*method), *found])
    note = (
        "Chosen once, on Dirichlet 0.3. Where the defaults were chosen, the two columns hold the same runs; on iid the "
        f"paper has another ρ for FedASAM+MAN and FedSpeed. Without ±: one seed. –: not measured. {unexplained(rows)}"
    )
    return Table("field-partitions", "CIFAR-100: the field on three partitions", header, rows, note.strip())


def gains(data: Field) -> Table:
    """What MAN adds to every algorithm."""
    columns = {
        f"{paper.partition_title(p)}, {how}": (study, p)
        for p in PARTITIONS
        for how, study in (("tuned", data.tuned), ("default", data.default))
    }
    header = ["algorithm", *columns]
    rows = [[method_title(a), *(_gain(data, study, a, p) for study, p in columns.values())] for a in TUNED]
    over = [f"{title}: {data.seeds_of_gains(*of)}" for title, of in columns.items() if data.gains(*of)]
    note = (
        f"Over the seeds that both have ({'; '.join(over) or 'none'}). diverges: with MAN and not without, with one "
        f"seed or more or in all runs of its tuning. –: not measured, or diverged without MAN. {unexplained(rows)}"
    ).strip()
    return Table("field-gains", "CIFAR-100: points that MAN adds", header, rows, note)


def penalties(data: Field) -> Table:
    """Other penalties, and more weight decay, beside MAN."""
    algorithms = list(data.penalised)
    kinds = dict.fromkeys(kind for of in data.penalised.values() for kind in of)
    rows = []
    for penalty, zeta, variant in sorted(kinds, key=lambda k: (bool(k[2]), penalty_order(k[0]), k[1:])):
        cells = []
        for a in algorithms:
            of, kind = data.penalised[a], (penalty, zeta, variant)
            known, base = of.get(kind), of.get(PLAIN)
            cells += [series_text(known), gain_text(gained(base, known)) if kind != PLAIN else BLANK]
        rows.append([penalty_title(penalty, variant), f"{zeta:g}" if penalty else BLANK, *cells])
    header = ["penalty", "ζ", *(word for a in algorithms for word in (method_title(a), "against none"))]
    title = f"CIFAR-100, {paper.partition_title(PLACE)}: other penalties against MAN"
    pairs = ((of[PLAIN], s) for of in data.penalised.values() if PLAIN in of for kind, s in of.items() if kind != PLAIN)
    note = f"Algorithms with their defaults. Against none: over the seeds that both have, {common_seeds_text(pairs)}."
    note = f"{note} {unexplained(rows)}".strip()
    return Table("field-penalties", title, header, rows, note)


def tried(data: Field) -> Table:
    """Every setting that was tried."""
    settings = [(str(tuning["rungs"][-1]), each) for tuning in data.tunings for each in tuning["settings"]]
    rows = []
    for last, each in sorted(settings, key=lambda found: position(TUNED, str(found[1]["config"]["algorithm"]))):
        value, known = each["scores"].get(last), last in each["scores"]
        score = (BLANK if not known else "diverged") if value is None else f"{value:.2f}"
        chosen, seconds = "●" if each["chosen"] else "", f"{each.get('seconds', math.nan):.1f}"
        rows.append([method_title(*method_of(each["config"])), setting_text(each), score, chosen, seconds])
    header = ["method", "setting", "accuracy on the samples held out, %", "chosen", "s"]
    return Table("field-tried", "Every setting that was tried", header, rows, words=2)


def penalty_title(penalty: str, variant: str) -> str:
    """A penalty in words: MAN; none, weight_decay=0.002."""
    return ", ".join(filter(None, (part_title("penalty", penalty) if penalty else "none", variant)))


def setting_text(choice: Tried | None) -> str:
    """A setting as it would be typed, without algorithm and ζ."""
    if choice is None:
        return BLANK
    apart = ("algorithm", "zeta")
    shown = {k: str(v).lower() if isinstance(v, bool) else v for k, v in choice["varied"].items() if k not in apart}
    return " ".join(f"{k}={v}" for k, v in shown.items())


def _seconds(s: Series | None) -> str:
    found = [run["seconds"] for run in s.runs if "diverged" not in run] if s else []
    return f"{statistics.fmean(found):.1f}" if found else BLANK


def _seeds(data: Study) -> str:
    cells = data.of(PLACE)
    return replace(data, cells=cells).seeds if cells else "no seeds"


def _gain(data: Field, study: Study, algorithm: str, partition: str) -> str:
    gain = data.gained(study, (algorithm, ""), (algorithm, MAN), partition)
    pair = (data.get(study, (algorithm, penalty), partition) for penalty in ("", MAN))
    return BLANK if gain is None else gain_text(gain) + max(s.mark for s in pair if s)
