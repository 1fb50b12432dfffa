"""The report's tables, the same text for the page, CSV and Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedman.config import PARTS
from fedman.paper import targets as paper
from fedman.paper.report.compare import MARKS, POISONING, Cell, Comparison, headers_swapped, printed
from fedman.paper.report.series import (
    UNEXPLAINED,
    Series,
    common_seeds_text,
    first_at_target,
    method_title,
    part_title,
    penalty_order,
    position,
)
from fedman.paper.targets import Target
from fedman.runs.records import Curve, Headline, ResultRow, is_explained
from fedman.runs.text_tables import comma_separated, markdown, mean_std

BLANK = "–"
POINTS = 50  # of a run's curve on the page
Entry = tuple[str, str, str]
"""Where a table by partition has something to say: algorithm, penalty ("" where there is none), partition."""


class Toned(str):
    """A cell's text with a CSS class."""

    tone: str

    def __new__(cls, text: str, tone: str) -> Toned:
        made = super().__new__(cls, text)
        made.tone = tone
        return made


@dataclass(frozen=True)
class Table:
    """A table with a name for its files, a title and a note for its readers."""

    name: str
    title: str
    header: list[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    words: int = 1  # the first so many columns are words, the others figures
    curves: Sequence[Curve] = ()  # one for each row, drawn on the page where the row is ticked

    def markdown(self) -> str:
        return f"**{self.title}**\n\n{markdown(self.header, self.rows)}" + (f"\n{self.note}\n" if self.note else "")

    def csv(self) -> str:
        """For programs: an empty cell for a blank one, and ASCII minus signs."""
        plain = [["" if cell == BLANK else cell.replace("−", "-") for cell in row] for row in self.rows]
        return comma_separated(self.header, plain)

    def curves_json(self) -> str:
        """For `page.js`: the different lists of rounds, and of each row the number of its list and its values."""
        thinned = [thin(curve) for curve in self.curves]
        rounds = list(dict.fromkeys(tuple(t for t, _ in points) for points in thinned))
        runs = [(rounds.index(tuple(t for t, _ in points)), [value for _, value in points]) for points in thinned]
        return json.dumps({"x": rounds, "runs": runs}, separators=(",", ":"), allow_nan=False)


def thin(curve: Curve) -> list[tuple[int, float]]:
    """At most `POINTS` finite points of a curve, its last among them, to four digits."""
    points = [(t, float(f"{v:.4g}")) for t, v in zip(curve["round"], curve["all"], strict=True) if math.isfinite(v)]
    return points[::-1][:: max(1, -(-len(points) // POINTS))][::-1]


def accuracy(data: Comparison) -> Table:
    """Every cell of a data set on a line, every figure in a column of its own."""
    header = ["partition", "method", data.headline.name, "std", "seeds", "rounds to target", *data.more_figures]
    header += ["paper", "paper's std", "difference", "agreement", "paper's rounds"] if data.in_paper else []
    rows = []
    for cell in data.cells:
        s, target = cell.series, cell.target
        form = data.headline.form(s.mean)
        mean = "diverged" if math.isnan(s.mean) else f"{s.mean:{form}}"
        spread = BLANK if s.std is None else f"{s.std:{form}}"
        row = [s.partition, s.method, mean, spread, str(len(s.runs)), rounds_text(s)]
        row += map(s.figure_text, data.more_figures)
        if data.in_paper:
            row += [f"{target.accuracy:.2f}", f"{target.std:.2f}"] if target else [BLANK, BLANK]
            row += [points(cell.difference), MARKS[cell.mark][1], _paper_rounds(cell)]
        rows.append(row)
    unit = "percent, " if data.headline.unit else ""
    note = f"{data.zeta_text}; {unit}of the mean of all clients' last models, over seeds."
    return Table(data.figures_name, f"{data.title}: {data.headline.name}", header, rows, note, 2)


def headline(data: Comparison) -> Table:
    """The paper's own layout: a row for each method, a column for each partition, the paper's figure in brackets."""

    def text(cell: Cell) -> str:
        beside = f" ({paper_accuracy(cell.target)}) {MARKS[cell.mark][0]}" if cell.target else ""
        return data.marked(cell.series.text, cell.series) + beside

    brackets = "; the paper's in brackets" if data.in_paper else ""
    how = f", {data.precision}" if data.in_paper else ""
    note = f"{data.zeta_text}, {data.seeds}{how}{brackets}. {legend(data)}".strip()
    title = f"{data.title}, {data.headline.name}{' in %' if data.headline.unit else ''}"
    texts = {_entry(c.series): [text(c)] for c in data.cells}
    return _by_partition(data, "headline", title, "method", texts, note)


def gains(data: Comparison) -> Table:
    """What the penalties add to each algorithm."""
    several = len(data.penalties) > 1
    texts: dict[Entry, list[str]] = {}
    for pair in data.pairs:
        plain, penalised = pair.plain.series, pair.penalised.series
        gain = gain_text(pair.gain, data.headline.form(plain.mean))
        gain = gain if pair.gain is None else data.marked(gain, plain, penalised)
        texts[_entry(penalised if several else plain)] = [gain, points(pair.paper_gain)]
    more = ["paper"] if data.in_paper else []
    what = (
        f"points that {data.added} adds" if data.headline.unit else f"what {data.added} gains in {data.headline.name}"
    )
    seeds = common_seeds_text((pair.plain.series, pair.penalised.series) for pair in data.pairs)
    note = f"{data.zeta_text}; over the seeds that both have: {seeds}."
    note += f" Positive is better: so much lower is the {data.headline.name}." if data.headline.lower_is_better else ""
    first = "method" if several else "algorithm"
    return _by_partition(data, "gain", f"{data.title}: {what}", first, texts, note, more)


def rounds(data: Comparison) -> Table:
    """Rounds to the target, beside the paper's."""
    texts: dict[Entry, list[str]] = {}
    for cell in data.cells:
        sign = f" {MARKS[cell.rounds_mark][0]}" if cell.rounds_mark else ""
        ratio = (BLANK if cell.rounds_ratio is None else f"{cell.rounds_ratio:.2f}") + sign
        measured = data.marked(rounds_text(cell.series), cell.series)
        texts[_entry(cell.series)] = [measured, Toned(_paper_rounds(cell), "quiet"), Toned(ratio, cell.rounds_mark)]
    first = "The first round" if data.seeds == "one seed" else "Median over seeds of the first round"
    note = f"{first} in which the mean of all clients reaches the target."
    note += " Ratio: to the paper's rounds; ● within 20 % of them, ▲ fewer, ▼ more." if data.in_paper else ""
    more = ["paper", "ratio"] if data.in_paper else []
    title = f"{data.title}: rounds to {data.target:g}{data.headline.unit}"
    return _by_partition(data, "rounds", title, "method", texts, note, more)


def _entry(s: Series) -> Entry:
    return s.algorithm, s.penalty, s.partition


def _by_partition(
    data: Comparison,
    name: str,
    title: str,
    first: str,
    texts: Mapping[Entry, list[str]],
    note: str,
    more: Sequence[str] = (),
) -> Table:
    """A row for each method; for each partition a column of its own and one for each of `more`."""
    header, rows = [first], []
    for partition in data.partitions:
        header += [paper.partition_title(partition), *more]
    for method in dict.fromkeys((algorithm, penalty) for algorithm, penalty, _ in texts):
        row = [method_title(*method)]
        for partition in data.partitions:
            row += texts.get((*method, partition), [BLANK] * 3)[: 1 + len(more)]
        rows.append(row)
    return Table(f"{data.name}-{name}", title, header, rows, f"{note} {unexplained(rows)}".strip())


def readings(data: Comparison) -> Table:
    """CIFAR-10 beside both readings of the paper's columns."""
    header = ["partition", "method", "accuracy %", "as printed", "difference", "headers swapped", "difference"]
    rows = []
    for cell in data.cells:
        row = [cell.series.partition, cell.series.method, data.marked(cell.series.text, cell.series)]
        for c in (cell, headers_swapped(cell)):
            row += [paper_accuracy(c.target), Toned(points(c.difference), c.mark)]
        rows.append(row)
    note = (
        "In all twelve rows of the paper's table the column headed δ = 0.6 is lower than the one headed δ = 0.3, "
        "although it is the easier split: the two headers have probably changed places."
    )
    note = f"{note} {unexplained(rows)}".strip()
    return Table(f"{data.name}-readings", f"{data.title}: both readings", header, rows, note, 2)


def sensitivity(data: Comparison) -> Table:
    """The headline against ζ."""
    rows = [
        [s.partition, s.method, f"{s.zeta:g}", data.marked(s.text, s), str(len(s.runs)), rounds_text(s)]
        for study in data.zeta_studies()
        for s in study
    ]
    goal = f"rounds to {data.target:g}{data.headline.unit}" if data.target else "rounds"
    header = ["partition", "method", "ζ", data.headline.column, "seeds", goal]
    title = f"{data.title}: {data.headline.name} against ζ"
    return Table(f"{data.name}-zeta", title, header, rows, unexplained(rows), 2)


def variants(data: Comparison) -> Table:
    """Settings on which paper and code disagree, beside the usual setting."""
    header = ["partition", "method", "changed", data.headline.column, "seeds", "usual setting", "difference"]
    header += ["paper"] if data.in_paper else []
    rows = []
    for changes, s, usual in data.variants():
        row = [s.partition, s.method, changes, data.marked(s.text, s), str(len(s.runs))]
        than = usual.series if usual else None
        apart = difference(data.headline, s.mean - than.mean, than.mean) if than else BLANK
        row += [data.marked(than.text, than) if than else BLANK, apart]
        row += [paper_accuracy(printed(s))] if data.in_paper else []
        rows.append(row)
    title = f"{data.title}: other readings of the paper and its code" if data.in_paper else f"{data.title}: variants"
    return Table(f"{data.name}-variants", title, header, rows, unexplained(rows), words=3)


def poisoning(data: Comparison) -> Table:
    """What attacks leave of the headline under each aggregation rule, without a penalty and with it."""
    groups = data.poisonings()

    def names(i: int, kind: str) -> list[str]:
        known, found = PARTS[kind].built_in, {pair[i] for group in groups.values() for pair in group}
        return sorted(found, key=lambda name: (position(known, name.partition(",")[0]), name))

    attacks, rules = (names(i, kind) for i, kind in enumerate(POISONING))
    members = [s for group in groups.values() for of_pair in group.values() for s in of_pair]
    penalties = sorted({s.penalty for s in members}, key=penalty_order)
    rows = []
    for (partition, algorithm, rest), group in groups.items():
        for attack in [name for name in attacks if any(name == found for found, _ in group)]:
            texts = []
            for rule in rules:
                by_penalty = {s.penalty: s.text for s in group.get((attack, rule), ())}
                texts.append(" / ".join(by_penalty.get(p, BLANK) for p in penalties) if by_penalty else BLANK)
            rows.append([partition, method_title(algorithm), rest or BLANK, attack, *texts])
    unit = " in %" if data.headline.unit else ""
    title = f"{data.title}: {data.headline.name}{unit} under attack, by aggregation rule"
    note = f"Each {' / '.join(part_title('penalty', p) if p else 'plain' for p in penalties)}; {data.zeta_text}."
    header = ["partition", "algorithm", "changed", "attack", *rules]
    same = [i for i in range(3) if len({row[i] for row in rows}) == 1]  # said once, in the note
    said = "; ".join(rows[0][i] for i in same if rows[0][i] != BLANK)
    header, *rows = ([cell for i, cell in enumerate(line) if i not in same] for line in (header, *rows))
    note = f"{said}. {note}" if said else note
    return Table(f"{data.name}-poisoning", title, header, rows, note, 4 - len(same))


def clients(data: Comparison) -> Table:
    """The headline on the clients' own test samples: its mean, the worst tenth, its spread."""
    rows = []
    shown = [s for s in data.all_series if s.clients]
    several = len({s.zeta for s in shown if s.zeta}) > 1
    for s in shown:
        form = data.headline.form(*(each["mean"] for each in s.clients))
        figures = zip(*((c["mean"], c["worst_tenth"], c["spread"]) for c in s.clients), strict=True)
        rows.append([s.partition, s.method, data.changes(s, several), *(mean_std(values, form) for values in figures)])
    header = ["partition", "method", "changed", "mean", "worst tenth", "spread"]
    figure = data.headline.title(" on the clients’ own test samples")
    note = (
        f"{figure[:1].upper()}{figure[1:]}. Every client counts the same. Worst tenth: the "
        "mean of that tenth of the clients, at least one. Spread: the standard deviation over clients."
    )
    if not any(row[2] for row in rows):
        header, rows = [header[0], header[1], *header[3:]], [[*row[:2], *row[3:]] for row in rows]
    return Table(f"{data.name}-clients", f"{data.title}: the clients", header, rows, note, len(header) - 3)


def all_runs(all_series: Sequence[Series]) -> Table:
    """A row for each run."""
    kinds = {s.headline for s in all_series}
    figure = kinds.pop().column if len(kinds) == 1 else "headline"
    header = ["data", "partition", "method", "ζ", "changed", "seed", figure, "rounds to target", "s",
              "precision", "device", "version", "commit"]  # fmt: skip
    rows = []
    for s in all_series:
        for run, value in zip(s.runs, s.values, strict=True):
            early = f"stopped after round {run.get('round')}" if "stopped" in run else ""
            changed = ", ".join(filter(None, (s.changed, early)))
            row = [s.dataset, s.partition, s.method, f"{s.zeta:g}", changed, str(run["config"]["seed"])]
            name = f"{s.headline.name} " if figure == "headline" else ""
            row += [name + mean_std([value], s.headline.form(value)), str(first_at_target(run) or BLANK)]
            row += [BLANK] * 3 if "diverged" in run else [f"{run['seconds']:.1f}", run["precision"], run["device"]]
            rows.append([*row, run["version"], _commit(run)])
    curves = [run["curve"] for s in all_series for run in s.runs]
    return Table("all-runs", "Every run", header, rows, words=3, curves=curves)


def _commit(run: ResultRow) -> str:
    """What explains a run's code: a commit or a release."""
    source = run.get("source", {})
    if not is_explained(run):
        return f"{source['commit'][:7]} and changes" if "commit" in source else "none"
    return source["commit"][:7] if "commit" in source else f"release {source['release']}"


def unexplained(rows: Sequence[Sequence[str]]) -> str:
    """A note on the mark, where it is used."""
    used = any(UNEXPLAINED in cell for row in rows for cell in row)
    return f"{UNEXPLAINED} with a run of code that is in no commit." if used else ""


def legend(data: Comparison) -> str:
    """What the marks mean."""
    return ", ".join(f"{sign} {meaning}" for sign, meaning in MARKS.values() if sign) + "." if data.in_paper else ""


def paper_accuracy(target: Target | None) -> str:
    """An accuracy of the paper."""
    return BLANK if target is None else f"{target.accuracy:.2f} ± {target.std:.2f}"


def _paper_rounds(cell: Cell) -> str:
    if cell.target is None or not cell.has_papers_goal:
        return BLANK
    return str(cell.target.rounds or "500+")


def points(value: float | None, form: str = ".2f") -> str:
    """A difference in points, with its sign."""
    return BLANK if value is None or math.isnan(value) else f"{value:+{form}}".replace("-", "−")


def gain_text(gain: float | None, form: str = ".2f") -> str:
    """What a penalty adds, or that a method diverges with it."""
    return "diverges" if gain is not None and math.isnan(gain) else points(gain, form)


def difference(headline: Headline, value: float, than: float) -> str:
    """A difference from the value `than` of a headline, with its sign, and with as many decimals as that has."""
    return points(value, headline.form(than))


def rounds_text(s: Series) -> str:
    """The median first round at the target."""
    if s.target is None:
        return BLANK
    if not math.isinf(s.rounds_to_target):
        return f"{s.rounds_to_target:g}"
    stops = [run.get("round", s.length) for run in s.runs if "stopped" in run and first_at_target(run) is None]
    return f"{min(stops, default=s.length)}+"
