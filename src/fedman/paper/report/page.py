"""The page: sections of words, pictures and tables, rendered into one HTML file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedman.paper import targets as paper
from fedman.paper.report import cost, curves, hessian, partitions, spectra, tables
from fedman.paper.report import narrative as words
from fedman.paper.report.compare import MARKS, Board
from fedman.paper.report.compare import boards as make_boards
from fedman.paper.report.figure import Picture
from fedman.paper.report.series import Series, method_order, method_title, series
from fedman.paper.report.sources import Sources
from fedman.paper.report.tables import Table
from fedman.runs.version import version


@dataclass(frozen=True)
class Group:
    """Pictures and tables that belong together; `buttons` switch curves on and off in all its pictures."""

    title: str = ""
    text: str = ""
    pictures: Sequence[Picture] = ()
    columns: int = 3
    buttons: Sequence[tuple[str, str]] = ()
    off: Sequence[str] = ()  # buttons that start unpressed
    cards: Sequence[dict[str, Any]] = ()
    note: str = ""
    files: str = ""
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    id: str
    title: str
    briefs: Sequence[tuple[str, Sequence[str]]] = ()  # headings with a few sentences each
    groups: Sequence[Group] = ()
    folded: Sequence[Table] = ()
    narrow: bool = False  # its groups are one picture wide, and two of them fit side by side


@dataclass(frozen=True)
class Report:
    """All that goes into the page and into the files beside it."""

    title: str
    lead: str
    tiles: list[tuple[str, str]]
    sections: list[Section]
    extra: list[Table] = field(default_factory=list)  # tables that are files alone

    @property
    def pictures(self) -> list[Picture]:
        return [p for s in self.sections for g in s.groups for p in g.pictures]

    @property
    def tables(self) -> list[Table]:
        shown = [t for s in self.sections for g in s.groups for t in g.tables]
        return [*shown, *(t for s in self.sections for t in s.folded), *self.extra]

    @property
    def summary(self) -> str:
        """The words of the first section as Markdown."""
        return "\n".join(f"**{name}.** {' '.join(said)}\n" for name, said in self.sections[0].briefs)


def compose(found: Sources) -> Report:
    """The report of what was found; draws all its pictures."""
    everything = series(found.rows)
    measured = hessian.read(found.flatness)
    boards = make_boards(everything)
    printed = any(board.printed for board in boards)
    sections = [_summary(boards, measured, found.notes)]
    sections += [_board(board) for board in boards if board.cells]
    flat = _flatness(found.flatness, measured)
    sections += filter(None, [_studies(boards), flat, _cost(boards, everything, found.costs)])
    if everything:
        sections.append(Section("runs", "All runs", folded=[tables.every_run(everything)]))
    extra = [made(board) for board in boards if board.cells for made in (tables.accuracy, tables.headline)]
    title = "Minimising layerwise activation norms, measured" if printed else "Federated runs, measured"
    lead = (
        "Federated learning with and without MAN, from our own runs, beside the tables of the WACV 2024 paper."
        if printed
        else "Federated learning with and without the MAN term."
    )
    return Report(title, lead, words.tiles(boards), sections, extra)


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
    style, script = (ours.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    footer = f"Made by fedman {version()}. Pictures and tables are also files, in {folder}/."
    page = environment.get_template("page.html.j2").render(
        title=report.title, lead=report.lead, tiles=report.tiles, sections=report.sections, version=version(),
        style=style, script=script, folder=folder, footer=footer,
    )  # fmt: skip
    return re.sub(r"\n\s*\n+", "\n", page)


def _summary(boards: Sequence[Board], measured: Sequence[hessian.Measured], notes: Sequence[str]) -> Section:
    briefs = [(board.title, words.about(board)) for board in boards]
    flat = words.flatness(measured)
    rest = {"Flatness": flat, "Not measured yet": words.missing(boards, measured), "Notes": notes}
    return Section("summary", "Summary", [*briefs, *((name, said) for name, said in rest.items() if said)])


def _board(board: Board) -> Section:
    parts = len(board.partitions)
    names = _buttons(cell.series.algorithm for cell in board.cells)
    groups = [
        Group(
            "From plain to MAN",
            "Open circle: the plain algorithm; full circle: with MAN."
            + (" Grey, below: the same in the paper." if board.printed else ""),
            curves.overview(board),
            min(parts, 3),
        ),
        Group(
            "Accuracy",
            cards=[_card(board, partition) for partition in board.partitions],
            note=f"{_what(board)}, ζ = {board.zeta:g}. {tables.legend(board)}",
            files=tables.accuracy(board).name,
        ),
    ]
    panels = [picture for row in curves.convergence(board) for picture in row]
    if panels:
        text = "Test accuracy of the mean of all clients' last models; mean over seeds, shaded from lowest to highest."
        goal = board.cells[0].series.target
        text += f" Dotted: the target of {goal:g} %." if goal else ""
        groups.append(Group("Convergence", text, panels, min(parts, 3), names))
    more = [tables.rounds(board), tables.readings(board) if board.dataset == "cifar10" else None]
    groups.append(Group(tables=[t for t in (*more, tables.gains(board)) if t is not None and t.rows]))
    pictures = partitions.pictures(board)
    if pictures:
        text = "Samples of every class (row) at every client (column); darker is more."
        groups.append(Group("Who holds what", text, pictures, min(parts, 3)))
    return Section(tables.slug(board.dataset), board.title, groups=groups, narrow=parts == 1)


def _what(board: Board) -> str:
    return "One seed" if board.seeds == (1, 1) else f"Mean ± standard deviation over {tables.seeds(board)}"


def _buttons(algorithms: Iterable[str]) -> list[tuple[str, str]]:
    """A button for each algorithm: what it switches, and what it says."""
    return [(tables.slug(a), method_title(a, False)) for a in sorted(set(algorithms), key=method_order)]


def _card(board: Board, partition: str) -> dict[str, Any]:
    rows = []
    for cell in board.of(partition):
        sign, meaning = MARKS[cell.mark]
        rows.append(
            {
                "algorithm": cell.series.algorithm,
                "method": cell.series.method,
                "man": cell.series.man,
                "measured": tables.mean_std(cell.series.accuracies),
                "paper": tables.printed(cell.target),
                "difference": tables.points(cell.difference),
                "mark": cell.mark,
                "sign": sign,
                "meaning": meaning,
            }
        )
    return {"title": paper.partition_title(partition), "printed": board.printed, "rows": rows}


def _studies(boards: Sequence[Board]) -> Section | None:
    groups = []
    for board in boards:
        pictures, table = curves.sensitivity(board), tables.sensitivity(board)
        if table is not None:
            text = "Shaded: the range in which the paper's text calls it stable." if board.printed else ""
            groups.append(Group(f"{board.title}: how much ζ matters", text, pictures, 2, tables=[table]))
        other = tables.variants(board)
        if other is not None:
            groups.append(Group(tables=[other]))
    return Section("studies", "Sensitivity and variants", groups=groups) if groups else None


def _flatness(records: Sequence[dict[str, Any]], measured: Sequence[hessian.Measured]) -> Section | None:
    found = hessian.tables(measured)
    if not found:
        return None
    made = spectra.pictures(measured)
    names = _buttons(m.algorithm for m in measured)
    shown = ("fedavg", "fedsam")  # the paper's choice; the others by their buttons
    off = [a for a, _ in names if a not in shown] if {a for a, _ in names} >= set(shown) else []
    groups = [Group("Largest eigenvalue and trace of the Hessian", hessian.basis(measured), tables=found)]
    if made["spectrum"]:
        groups.append(Group("The largest eigenvalues", "", made["spectrum"], 2, names, off))
    if made["density"]:
        text = f"Stochastic Lanczos quadrature, smoothed over {100 * spectra.SMOOTH:g} % of the largest eigenvalue."
        groups.append(Group("Density of all eigenvalues", text, made["density"], 2, names, off))
    if made["landscape"]:
        text = "Training loss around the models along two directions, on one scale for all."
        groups.append(Group("Loss landscapes", text, made["landscape"], 2))
    more = hessian.layers(measured), hessian.clients(measured), hessian.every(records)
    folded = [table for table in more if table is not None]
    return Section("flatness", "Flatness", groups=groups, folded=folded)


def _cost(boards: Sequence[Board], everything: Sequence[Series], costs: Sequence[dict[str, Any]]) -> Section | None:
    counted: dict[str, Table] = {}
    for board in boards:
        if (table := cost.formula(board.dataset)) is not None:
            counted.setdefault(table.name, table)
    shown = [t for t in (cost.measured(costs), *counted.values()) if t is not None]
    times = cost.runs(everything)
    folded = [times] if times else []
    return Section("cost", "Cost", groups=[Group(tables=shown)], folded=folded) if shown or folded else None
