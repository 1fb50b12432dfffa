"""The page: sections of sentences, figures and tables, rendered into one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import url_quote

from fedman.paper.flatness.flatness_json import FlatnessRecord
from fedman.paper.report import (
    claims,
    cost,
    curves,
    field,
    field_narrative,
    field_sharpness,
    field_tables,
    hessian,
    narrative,
    partitions,
    spectra,
    tables,
)
from fedman.paper.report.compare import MARKS, Comparison, comparisons, penalties_title
from fedman.paper.report.figure import COLOURS, Picture, buttons, key, tones
from fedman.paper.report.series import MAN, Series, Setting, left_out, penalties_of, series, slug
from fedman.paper.report.sources import Sources, StepCost, Theorems
from fedman.paper.report.tables import Table
from fedman.paper.targets import partition_title
from fedman.runs.records import stopped_early
from fedman.runs.version import version


@dataclass(frozen=True)
class Group:
    """Figures and tables that belong together; `buttons` switch curves on and off in all its figures."""

    title: str = ""
    text: str = ""
    pictures: Sequence[Picture] = ()
    columns: int = 3
    buttons: Sequence[tuple[str, str]] = ()  # the algorithm each one switches, and its label
    penalties: Sequence[tuple[str, str]] = ()  # the same for penalties
    off: Sequence[str] = ()  # buttons that start unpressed
    cards: Comparison | None = None  # a card of figures for each partition
    note: str = ""
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    id: str
    title: str
    briefs: Sequence[tuple[str, Sequence[str]]] = ()  # headings with a few sentences each
    groups: Sequence[Group] = ()
    folded: Sequence[Table] = ()
    narrow: bool = False  # its groups are one figure wide, and two of them fit side by side


@dataclass(frozen=True)
class Report:
    """All that goes into the page and into the files beside it."""

    title: str
    lead: str
    tiles: list[tuple[str, str]]
    sections: list[Section]
    extra: list[Table]  # tables that are files alone
    colours: dict[str, tuple[str, ...]]  # of figures and algorithms, on a light and on a dark page
    answer: str = ""  # what the field's study says, for the README
    aside: Sequence[str] = ()  # titles of data sets that are not the paper's, in a report that has its data sets

    @property
    def pictures(self) -> list[Picture]:
        return [p for s in self.sections for g in s.groups for p in g.pictures]

    @property
    def tables(self) -> list[Table]:
        shown = [t for s in self.sections for g in s.groups for t in g.tables]
        return [*shown, *(t for s in self.sections for t in s.folded), *self.extra]

    @property
    def summaries(self) -> dict[str, str]:
        """The sentences of the sections that have some, as Markdown, by the names of their files; beside the paper's
        data sets others are left out."""
        answer = {"field-answer": self.answer} if self.answer else {}
        return answer | {
            s.id if s.id == "summary" else f"{s.id}-summary": "\n".join(
                f"**{name}.** {' '.join(sentences)}\n" for name, sentences in s.briefs if name not in self.aside
            )
            for s in self.sections
            if s.briefs
        }


def compose(found: Sources) -> Report:
    """The report of what was found; draws all its figures."""
    all_series = series(found.rows)
    measured = hessian.merge(found.flatness)
    fields_series = series(found.field.rows)
    notes = [*found.notes, *left_out(found.rows, all_series), *left_out(found.field.rows, fields_series)]
    if stopped := stopped_early([*found.rows, *found.field.rows]):
        notes.append(f"{stopped}; the figures are those at the stop.")
    compared = comparisons(all_series)
    the_field = field.field(found.field, found.rows)
    sections = [
        _summary(compared, measured, notes),
        *(_dataset(data) for data in compared if data.cells),
        *([_field(the_field)] if the_field else []),
        Section("studies", "Sensitivity and variants", groups=[group for data in compared for group in _studies(data)]),
        _flatness(found.flatness, measured, found.theorems),
        _cost(compared, all_series, found.costs),
        Section("runs", "All runs", folded=[tables.all_runs([*all_series, *fields_series])]),
    ]
    extra = [made(data) for data in compared if data.cells for made in (tables.accuracy, tables.headline)]
    of_field = (
        [cell.series for data in (the_field.tuned, the_field.default) for cell in data.cells] if the_field else []
    )
    known: list[Setting] = [*all_series, *measured, *of_field]
    title, lead, aside = "Federated runs, measured", _lead(penalties_of(known)), []
    if any(data.in_paper for data in compared):
        title = "Minimising layerwise activation norms, measured"
        lead = "Federated learning with and without MAN, from our own runs, beside the tables of the WACV 2024 paper."
        aside = [data.title for data in compared if not data.in_paper]
    shown = [s for s in map(_without_empty, sections) if s.briefs or s.groups or s.folded]
    colours = {key(each.algorithm): tones(each.algorithm) for each in known}
    colours = COLOURS | {name: pair for name, pair in colours.items() if name not in COLOURS}
    tiles, answer = narrative.tiles(compared, len(found.field.rows)), field_narrative.answer(the_field)
    return Report(title, lead, tiles, shown, extra, colours, answer, aside)


def render(report: Report, folder: str) -> str:
    """The page as HTML; `folder` is where its links to files lead."""
    environment = Environment(
        loader=PackageLoader("fedman.paper.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    ours = resources.files("fedman.paper.report")
    style, script = (_dense(ours.joinpath(name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    page = environment.get_template("page.html.j2").render(
        report=report, folder=folder, version=version(), style=style, script=script, marks=MARKS,
        paper_accuracy=tables.paper_accuracy, points=tables.points, partition_title=partition_title, slug=slug, key=key,
        policy=_policy(script), link=url_quote(os.fsencode(folder)),
    )  # fmt: skip
    return _dense(page).encode("utf-8", "backslashreplace").decode()  # a file's name need not be Unicode


def _dense(text: str) -> str:
    """The text without empty lines."""
    return re.sub(r"\n\s*\n+", "\n", text)


def _policy(script: str) -> str:
    """The page's Content-Security-Policy: no script but its own, and nothing is fetched, whatever a style may say."""
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{own}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _without_empty(section: Section) -> Section:
    """The section without tables that have no rows, and without groups that show nothing."""
    groups = [replace(group, tables=[table for table in group.tables if table.rows]) for group in section.groups]
    shown = [group for group in groups if group.pictures or group.tables or group.cards]
    return replace(section, groups=shown, folded=[table for table in section.folded if table.rows])


def _summary(compared: Sequence[Comparison], measured: Sequence[hessian.Measured], notes: Sequence[str]) -> Section:
    briefs: list[tuple[str, Sequence[str]]] = [
        *((data.title, narrative.dataset(data)) for data in compared),
        ("Flatness", narrative.flatness(measured)),
        ("Not measured yet", narrative.missing(compared, measured)),
        ("Notes", notes),
    ]
    return Section("summary", "Summary", [(name, sentences) for name, sentences in briefs if sentences])


def _dataset(data: Comparison) -> Section:
    columns = min(len(data.partitions), 3)
    names, penalties = buttons([cell.series for cell in data.cells])
    name, unit = data.headline.name, data.headline.unit
    seeds = "One seed" if data.seeds == "one seed" else f"Mean ± standard deviation over {data.seeds}"
    better = "; lower is better" if data.headline.lower_is_better else ""
    curve = (
        f"Test {name} of the mean of all clients' last models; mean over seeds, shaded from lowest to highest{better}."
    )
    curve += f" Dotted: the target of {data.target:g}{unit}." if data.target else ""
    own = f"Test {name} of every client on its own samples, sorted{better}; mean over seeds."
    rounds = [tables.rounds(data)] if data.target else []
    readings = [tables.readings(data)] if data.dataset == "cifar10" and data.in_paper else []
    marked = tables.unexplained(tables.headline(data).rows)
    held = "Samples of every class (row) at every client (column); the stronger the colour, the more."
    groups = [
        _overview(data, columns),
        Group(
            name[:1].upper() + name[1:] if unit else f"Test {name}",
            columns=columns,
            cards=data,
            note=f"{seeds}, {data.zeta_text}{better}. {tables.legend(data)} {marked}".strip(),
        ),
        Group("Convergence", curve, curves.convergence(data), columns, names, penalties),
        Group("Clients", own, curves.clients(data), columns, names, penalties),
        Group(tables=[tables.clients(data), *rounds, *readings, tables.gains(data)]),
        Group("Partitions", held, [] if data.model else partitions.pictures(data), columns),
    ]
    return Section(data.name, data.title, groups=groups, narrow=columns == 1)


def _field(data: field.Field) -> Section:
    shown = data.tuned if data.tuned.cells else data.default
    columns = min(len(shown.partitions), 3)
    names, penalties = buttons([cell.series for cell in shown.cells])
    here = replace(shown, cells=shown.of(field.PLACE))
    dots = field_sharpness.scatter(data)
    curve = f"Test accuracy on {partition_title(field.PLACE)}; mean over seeds, shaded from lowest to highest."
    groups = [
        Group(tables=[field_tables.ranking(data)]),
        *([_overview(shown, columns)] if shown.cells else []),
        Group("Convergence", curve, curves.convergence(here), 3, names, penalties),
        Group(tables=[field_tables.gains(data), field_tables.partitions(data), field_tables.penalties(data)]),
        Group(
            "Flatness and accuracy",
            field_sharpness.caption(data) if dots else "",
            dots,
            3,
            tables=[field_sharpness.correlations(data)],
        ),
    ]
    briefs = field_narrative.briefs(data)
    return Section("field", "The field after the paper", briefs, groups, [field_tables.tried(data)])


def _overview(data: Comparison, columns: int) -> Group:
    pictures = curves.overview(data)
    if not data.penalties and not data.in_paper:
        return Group("The methods", "", pictures, columns)
    circles = f"Open circle: the plain algorithm; full circle: with {data.added}."
    circles += " Grey, below: the same in the paper." if data.in_paper else ""
    return Group(f"From plain to {data.added}", circles, pictures, columns)


def _lead(penalties: Sequence[str]) -> str:
    added = penalties_title(penalties)
    term = f"the {added} term" if MAN in penalties and len(penalties) == 1 else added
    return f"Federated learning with and without {term}." if penalties else "Runs of federated learning."


def _studies(data: Comparison) -> list[Group]:
    text = "Shaded: the range in which the paper's text calls it stable." if data.in_paper else ""
    title, zeta = f"{data.title}: how much ζ matters", [tables.sensitivity(data)]
    others = [tables.variants(data), tables.poisoning(data)]
    return [Group(title, text, curves.sensitivity(data), 2, tables=zeta), Group(tables=others)]


def _flatness(
    records: Sequence[FlatnessRecord], measured: Sequence[hessian.Measured], theorems: Sequence[Theorems]
) -> Section:
    names, penalties = buttons(measured)
    shown = {"fedavg", "fedsam"}  # as in the paper; the others by their buttons
    off = [name for name, _ in names if name not in shown] if shown <= {name for name, _ in names} else []
    other = any("task" in record["run"].get("config", {}) for record in records)  # it is left out for classification
    loss = "loss" if other else "cross-entropy"
    drawn = spectra.by_partition(measured)
    top, density, landscapes = (
        [picture for members in drawn for picture in draw(members)]
        for draw in (spectra.spectrum, spectra.density, spectra.landscapes)
    )
    smooth = f"Stochastic Lanczos quadrature, smoothed over {100 * spectra.SMOOTH:g} % of the largest eigenvalue."
    around = "Training loss around the models along two directions, on one scale for each partition."
    around += f" Of more than {spectra.MOST} models on a partition those of FedAvg are drawn, as in the paper."
    groups = [
        Group("The paper's claims", tables=[claims.table(measured)]),
        Group("Largest eigenvalue and trace", hessian.basis(measured, loss), tables=hessian.tables(measured)),
        Group("The largest eigenvalues", "", top, 2, names, penalties, off),
        Group("Density of all eigenvalues", smooth, density, 2, names, penalties, off),
        Group("Loss landscapes", around, landscapes, 2),
        Group("The theory, evaluated", tables=[hessian.theory(theorems)]),
    ]
    folded = [
        hessian.losses(measured),
        hessian.layers(measured),
        hessian.clients(measured),
        hessian.all_measurements(records),
    ]
    return Section("flatness", "Flatness", groups=groups, folded=folded)


def _cost(compared: Sequence[Comparison], all_series: Sequence[Series], costs: Sequence[StepCost]) -> Section:
    counted: dict[str, Table] = {}
    for data in compared:
        if (table := cost.formula(data.dataset)) is not None:
            counted.setdefault(table.name, table)
    shown = Group(tables=[cost.measured(costs), *counted.values()])
    return Section("cost", "Cost", groups=[shown], folded=[cost.runs(all_series)])
