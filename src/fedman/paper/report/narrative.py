"""The report's sentences: what was measured, how it compares with the paper, what is missing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fedman.paper import targets as paper
from fedman.paper.presets import METHODS, SEEDS, SWEEPS, ZETA
from fedman.paper.report import claims
from fedman.paper.report.compare import (
    ABOVE,
    BELOW,
    POINT,
    STD,
    Cell,
    Comparison,
    headers_swapped,
    penalties_title,
)
from fedman.paper.report.hessian import Measured, plain_and_penalised
from fedman.paper.report.rank_correlation import spearman
from fedman.paper.report.series import MAN, Series, Setting, gained, method_title, part_title, penalties_of
from fedman.paper.report.tables import difference, points
from fedman.runs.grid import cells
from fedman.runs.records import Headline
from fedman.runs.sweep import recorded

Place = tuple[str, str, str, str]
"""A cell of a table: data set, partition, algorithm, penalty."""


def dataset(data: Comparison) -> list[str]:
    """A few sentences on one data set."""
    sentences = [_measured(data)]
    sentences += [_gain(data, penalty) for penalty in _with_usual_zeta(data)]
    sentences += _every_zeta(data)
    compared = [cell for cell in data.cells if cell.target]
    if compared:
        sentences += [_agreement(compared), *_swapped_headers(data), *_order(data)]
    return [*sentences, *_rounds(data, compared)]


def flatness(measured: Sequence[Measured]) -> list[str]:
    """What the penalties do to the Hessian, and how large it is beside the paper's."""
    penalties = penalties_of(measured)
    found = [sentence for penalty in penalties for sentence in _falls(measured, penalty)]
    standing = [sentence for penalty in penalties for sentence in _standing(measured, penalty)]
    return [*found, *_sizes(measured), *standing, *claims.sentences(measured)]


def _sizes(measured: Sequence[Measured]) -> list[str]:
    """λ_max and trace as shares of the paper's, over all models that the paper has without a doubt."""
    known = [(m, theirs) for m in measured if not m.variant and (theirs := m.printed) and not theirs.doubt]
    ratios = {
        "largest eigenvalue": [m.top / theirs.top for m, theirs in known if not math.isnan(m.top)],
        "trace": [m.trace / theirs.trace for m, theirs in known if not math.isnan(m.trace)],
    }
    told = [
        f"the {what} is {min(v):.2f} to {max(v):.2f} of the paper's ({claims.counted(v, 'model')})"
        for what, v in ratios.items()
        if v
    ]
    off = any(abs(ratio - 1) > 0.1 for v in ratios.values() for ratio in v)
    return [f"Sizes do not agree: {', '.join(told)}."] if off else []


def _falls(measured: Sequence[Measured], penalty: str) -> list[str]:
    pairs, title = plain_and_penalised(measured, penalty), part_title("penalty", penalty)
    sentences = []
    for what, figures in (
        ("largest eigenvalue", [(plain.top, penalised.top) for plain, penalised in pairs]),
        ("trace", [(plain.trace, penalised.trace) for plain, penalised in pairs]),
    ):
        changes = [after / before - 1 for before, after in figures if before > 0 and not math.isnan(after)]
        if changes:
            lower, by = sum(change < 0 for change in changes), claims.percent(changes)
            sentences.append(
                f"{title} lowers the Hessian's {what} in {lower} of {claims.counted(changes, 'pair')} ({by})."
            )
    return sentences


def _standing(measured: Sequence[Measured], penalty: str) -> list[str]:
    """How the training loss and its gradient differ within pairs, whose sharpness is compared all the same."""
    pairs = [[m.best.get("loss") for m in pair] for pair in plain_and_penalised(measured, penalty)]
    known = [(a, b) for a, b in pairs if a and b]
    rises = [b["value"] - a["value"] for a, b in known if a["value"] is not None and b["value"] is not None]
    norms = [(a.get("gradient_norm"), b.get("gradient_norm")) for a, b in known]
    ratios = [after / before for before, after in norms if before and after is not None]
    if not rises or not ratios:
        return []
    loss, gradient = claims.between(rises, lambda v: points(v, ".2g")), claims.between(ratios, lambda v: f"{v:.1f}")
    return [
        f"{part_title('penalty', penalty)} changes the training loss by {loss} and makes its gradient {gradient} times "
        f"as long ({claims.counted(ratios, 'pair')}): part of the difference in sharpness may come from that."
    ]


def missing(comparisons: Sequence[Comparison], measured: Sequence[Measured]) -> list[str]:
    """Cells of the paper's tables without a run or with too few seeds, and the same of its Hessians; nothing where no
    table of the paper was begun."""
    if not any(data.in_paper for data in comparisons):
        return []
    wanted = {
        name: [(name, where, a, penalty) for a in METHODS for penalty in ("", MAN) for where in paper.PARTITIONS]
        for name in paper.TABLES
    }
    runs = {_place(c.series): len(c.series.runs) for d in comparisons if d.in_paper for c in d.cells}
    sentences = [text for name, of in wanted.items() for text in _gaps(paper.title(name), of, runs)]
    usual = [m for m in measured if not m.variant]
    models = [c for of in wanted.values() for c in of if paper.sharpness(*c[:3], bool(c[3]))]
    for what, has in (
        ("Hessian", lambda m: not math.isnan(m.top)),
        ("The Hessian's blocks by layer", lambda m: "layers" in m.best),
        ("The clients' λ_max", lambda m: "clients" in m.best),
    ):
        sentences += _gaps(what, models, Counter(_place(m) for m in usual if has(m)))
    return [*sentences, *_left(comparisons)]


def _left(comparisons: Sequence[Comparison]) -> list[str]:
    """How many runs of the paper's sensitivity and variants there are not, of committed code."""
    rows = [row for data in comparisons for s in data.all_series for row in s.runs]
    sentences = []
    for name in ("paper-zeta", "paper-variants", "paper-tiny-variants"):
        grid = cells({"seed": SEEDS}, SWEEPS[name])
        left = len(grid) - len(recorded(grid, rows))
        sentences += [f"Sweep {name}: {left} of {len(grid)} runs with committed code."] if left else []
    return sentences


def _place(of: Setting) -> Place:
    return of.dataset, of.partition, of.algorithm, of.penalty


def _gaps(title: str, wanted: Sequence[Place], seeds: Mapping[Place, int]) -> list[str]:
    """What has no seed, and how many have fewer than the paper."""
    gaps = Counter(method_title(*place[2:]) for place in wanted if place not in seeds)
    few = sum(place in seeds and seeds[place] < len(SEEDS) for place in wanted)
    if gaps.total() == len(wanted):
        return [f"{title}: all of its {len(wanted)} cells."]
    methods = ", ".join(f"{method} ({count})" for method, count in gaps.items())
    told = [f"{gaps.total()} of {len(wanted)} cells: {methods}"] if gaps else []
    told += [f"{few} cells have fewer than {len(SEEDS)} seeds"] if few else []
    return [f"{title}: {'; '.join(told)}."] if told else []


def tiles(comparisons: Sequence[Comparison], more: int = 0) -> list[tuple[str, str]]:
    """The few figures to read first, each with what it is; `more` runs are not in the comparisons."""
    by_headline = {data.headline: [d for d in comparisons if d.headline == data.headline] for data in comparisons}
    cells = [cell for data in comparisons for cell in data.cells]
    compared = [cell for cell in cells if cell.target]
    made = [(str(more + sum(len(s.runs) for data in comparisons for s in data.all_series)), "runs")]
    if pairs := [found for data in comparisons for found in data.gains]:
        gains = [gain for _, gain in pairs]
        added = penalties_title(penalties_of(pair.penalised.series for pair, _ in pairs))
        every = [data.title for data in comparisons if data.ties]
        beside = f"; of {', '.join(every)} each ζ tried is one" if every else ""
        made.append((share_of(gains), f"pairs in which {added} gains{lost(gains, '; it diverges in')}{beside}"))
    for headline, members in by_headline.items():
        made += _median_gain(headline, members)
    if compared:
        marks = Counter(cell.mark for cell in compared)
        beyond = f"({marks[ABOVE]} above that, {marks[BELOW]} below)"
        made.append((f"{marks[STD] + marks[POINT]} of {len(compared)}", f"cells within a point of the paper {beyond}"))
        return made
    for headline, members in by_headline.items():
        finite = [c.series for data in members for c in data.cells if not math.isnan(c.series.mean)]
        if finite:
            best = max(finite, key=lambda s: headline.gain(0.0, s.mean))
            value = f"{best.mean:.1f} %" if headline.unit else headline.shown(best.mean)
            of = "" if headline == Headline() else f" {headline.name}"
            made.append((value, f"the best{of}: {best.method}"))
    return made


def _median_gain(headline: Headline, comparisons: Sequence[Comparison]) -> list[tuple[str, str]]:
    """The median over data sets, whose unit must be one: percent, or that of one data set."""
    known = [found for data in comparisons for found in data.gains]
    finite = [(pair, gain) for pair, gain in known if not math.isnan(gain)]
    if not finite or not (headline.unit or len(comparisons) == 1):
        return []
    what = "points, the median gain" if headline.unit else f"the median gain in {headline.name}"
    what += f" of the {len(finite)} that did not diverge" if len(finite) < len(known) else ""
    median = float(np.median([gain for _, gain in finite]))
    return [(difference(headline, median, finite[0][0].plain.series.mean), what)]


def _measured(data: Comparison) -> str:
    if not data.cells:
        return "No run in the usual setting."
    cells = "cell" if len(data.cells) == 1 else "cells"
    text = f"{len(data.cells)} {cells}, {data.seeds} each, {data.zeta_text}."
    diverged = [_where(cell.series) for cell in data.cells if math.isnan(cell.series.mean)]
    return f"{text} Diverged: {'; '.join(diverged)}." if diverged else text


def _with_usual_zeta(data: Comparison) -> list[str]:
    """The penalties that were run beside plain algorithms with a ζ that is the usual one."""
    return penalties_of(pair.penalised.series for pair in data.pairs if pair.penalised.series.penalty not in data.ties)


def share_of(gains: Sequence[float]) -> str:
    """How many are gains, of all; what diverged, nan, is none."""
    return f"{sum(gain > 0 for gain in gains)} of {len(gains)}"


def lost(gains: Sequence[float], words: str) -> str:
    """How many diverged, after some words; nothing where none did."""
    count = sum(map(math.isnan, gains))
    return f"{words} {count}" if count else ""


def _gain(data: Comparison, penalty: str) -> str:
    known = [(pair, gain) for pair, gain in data.gains if pair.penalised.series.penalty == penalty]
    gains = [gain for _, gain in known]
    pairs = sorted(((pair, gain) for pair, gain in known if not math.isnan(gain)), key=lambda found: found[1])
    added, headline = part_title("penalty", penalty), data.headline
    if not pairs:
        every = f"{added} diverges in {len(known)} of {claims.counted(known, 'pair')}."
        return every if known else f"No pair of plain and {added} can be compared."
    (low, where_low), (high, where_high) = (
        (difference(headline, gain, p.plain.series.mean), _where(p.plain.series)) for p, gain in (pairs[0], pairs[-1])
    )
    units = " points" if headline.unit else ""
    if len(known) == 1:
        if headline.lower_is_better:
            return f"{added} gains {low} in the {headline.name} of {where_low}; positive is better, lower."
        return f"{added} changes the {headline.name} of {where_low} by {low}{units}."
    does, change = ("lowers", "gain") if headline.lower_is_better else ("raises", "change")
    low = f"{low} ({where_low}) to " if len(pairs) > 1 else ""
    text = (
        f"{added} {does} the {headline.name} in {share_of(gains)} pairs{lost(gains, ' and diverges in')}; the "
        f"{change} is {low}{high}{units} ({where_high})"
    )
    theirs = [gain for pair, _ in pairs if (gain := pair.paper_gain) is not None]
    return f"{text}; in the paper {claims.between(theirs, points)}." if theirs else f"{text}."


def _every_zeta(data: Comparison) -> list[str]:
    """Where the paper has no ζ that of the cells is one of those tried: what all of them gain."""
    sentences = []
    for plain, *tried in data.zeta_studies(1) if data.dataset not in ZETA else []:
        gains = {s.zeta: found for s in tried if (found := gained(plain, s)) is not None}
        finite = [gain for gain in gains.values() if not math.isnan(gain)]
        if plain.penalty or not gains or (len(gains) < 2 and tried[0].penalty not in data.ties):
            continue
        ends = [difference(data.headline, end(finite), plain.mean) for end in (min, max)] if finite else []
        units = " points" if data.headline.unit else ""
        what = f"gains {' to '.join(dict.fromkeys(ends))}{units}" if finite else "diverges"
        zetas, title = claims.between(list(gains), "{:g}".format), part_title("penalty", tried[0].penalty)
        diverged = ", ".join(f"ζ = {zeta:g}" for zeta, gain in gains.items() if finite and math.isnan(gain))
        text = f"Over all ζ tried ({zetas}) {title} {what} ({_where(plain)})"
        sentences.append(f"{text}{diverged and f'; diverged: {diverged}'}.")
    return sentences


def _where(s: Series) -> str:
    return f"{s.method}, {paper.partition_title(s.partition)}"


def _agreement(compared: Sequence[Cell]) -> str:
    marks = Counter(cell.mark for cell in compared)
    what = "means" if any(len(cell.series.runs) > 1 for cell in compared) else "values of one seed"
    text = (
        f"Of {len(compared)} {what} {marks[STD]} lie within the paper's standard deviation, {marks[POINT]} more within "
        f"a point of its mean, {marks[ABOVE]} more than a point above and {marks[BELOW]} more than a point below it."
    )
    differences = sorted((d, _where(cell.series)) for cell in compared if (d := cell.difference) is not None)
    if len(differences) < 2:
        return text
    (low, lowest), (high, highest) = differences[0], differences[-1]
    return f"{text} The differences are {points(low)} ({lowest}) to {points(high)} ({highest})."


def _rounds(data: Comparison, compared: Sequence[Cell]) -> list[str]:
    """How the rounds to the target compare, more and fewer alike."""
    marks = Counter(cell.rounds_mark for cell in compared if cell.rounds_mark)
    if not marks or data.target is None:
        return []
    ratios = [(ratio, cell) for cell in compared if (ratio := cell.rounds_ratio) is not None]
    sides = Counter(cell.rounds_mark for _, cell in ratios)
    text = f"Rounds to {data.target:g} %: "
    if ratios:
        (low, least), (high, most) = (end(ratios, key=lambda known: known[0]) for end in (min, max))
        text += (
            f"of the {len(ratios)} cells that reach it here and in the paper, {sides[STD]} are within ±20 % of the "
            f"paper's rounds, {sides[ABOVE]} need fewer and {sides[BELOW]} more ({low:.2f} times, "
            f"{_where(least.series)}, to {high:.2f} times, {_where(most.series)}); "
        )
    alone = [cell for cell in compared if cell.rounds_mark in (ABOVE, BELOW) and cell.rounds_ratio is None]
    text += f"{marks.total() - len(ratios) - len(alone)} reach it in neither"
    named = [f"{_where(c.series)} only {'here' if c.rounds_mark == ABOVE else 'in the paper'}" for c in alone]
    return [f"{text}; {'; '.join(named)}." if named else f"{text}."]


def _swapped_headers(data: Comparison) -> list[str]:
    """How near the paper's CIFAR-10 table is in either reading of its two Dirichlet columns."""
    cells = [cell for cell in data.cells if data.dataset == "cifar10" and cell.series.partition != "iid"]
    swapped = [headers_swapped(cell) for cell in cells]
    distances = [[abs(c.difference) for c in reading if c.difference is not None] for reading in (cells, swapped)]
    if not all(distances):
        return []
    as_printed, exchanged = (f"{np.mean(d):.2f}" for d in distances)
    marks = [Counter(cell.mark for cell in reading) for reading in (cells, swapped)]
    first, second = (f"{found[BELOW]} more than a point below, {found[ABOVE]} above" for found in marks)
    return [
        f"The {len(cells)} Dirichlet cells are {as_printed} points from the paper's on average as printed ({first}), "
        f"{exchanged} with its two Dirichlet headers exchanged ({second})."
    ]


def _order(data: Comparison) -> list[str]:
    """Rank correlation of the methods with the paper's for each partition in which all twelve are measured."""
    found = []
    for partition in data.partitions:
        both = [
            (cell.series.mean, cell.target.accuracy)
            for cell in data.of(partition)
            if cell.target and not math.isnan(cell.series.mean)
        ]
        if len(both) == 2 * len(METHODS) and (rho := spearman(both)) is not None:
            found.append(f"{rho:.2f} ({paper.partition_title(partition)})")
    return [f"Rank correlation of the twelve methods with the paper's order: {', '.join(found)}."] if found else []
