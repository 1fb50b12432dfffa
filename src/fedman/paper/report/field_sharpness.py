"""Whether flatness follows accuracy: measures of sharpness of the tuned models of the field beside their accuracy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from fedman.paper.flatness.flatness_json import Measurements
from fedman.paper.report.field import Field, method_of
from fedman.paper.report.figure import SHEET, Picture, colour, finish, panel
from fedman.paper.report.rank_correlation import spearman
from fedman.paper.report.series import Series, method_title, seeds_text
from fedman.paper.report.tables import BLANK, Table, points
from fedman.runs.records import ResultRow, Settings, axes, headline
from fedman.runs.results import identity
from fedman.runs.text_tables import mean_std

SIDES: dict[str, Callable[[Settings], object]] = {
    "all": lambda config: True,
    "plain": lambda config: not config["zeta"],
    "with MAN": lambda config: config["zeta"],
}


class Measure(NamedTuple):
    """A measure of sharpness: its name for people, and its value among what was measured of a model."""

    title: str
    of: Callable[[Measurements], float | None]


MEASURES = {
    "hessian": Measure("λ_max of the Hessian", lambda m: m["top"]["values"][0] if "top" in m else None),
    "trace": Measure("trace of the Hessian", lambda m: m["trace"]["value"] if "trace" in m else None),
    "gauss-newton": Measure(
        "λ_max of the Gauss-Newton matrix", lambda m: m["gauss_newton"]["top"] if "gauss_newton" in m else None
    ),
    "average": Measure("average adaptive sharpness", lambda m: _sharpness(m, "average")),
    "worst-2": Measure("worst-case adaptive sharpness, p = 2", lambda m: _sharpness(m, "worst_2")),
    "worst-inf": Measure("worst-case adaptive sharpness, p = ∞", lambda m: _sharpness(m, "worst_inf")),
    "m-2": Measure("m-sharpness, p = 2", lambda m: _sharpness(m, "m_2")),
    "m-inf": Measure("m-sharpness, p = ∞", lambda m: _sharpness(m, "m_inf")),
}


def correlations(data: Field) -> Table:
    """Spearman's rank correlation of each measure of sharpness with the test accuracy of the same model."""
    rows = []
    for name, measure in MEASURES.items():
        found = [(points(rho), str(count)) for rho, count in (correlation(data, name, side) for side in SIDES)]
        rows.append([measure.title, *(word for pair in found for word in pair)])
    header = ["measure", *(word for side in SIDES for word in (side, "models"))]
    note = (
        f"Spearman's ρ over the models tuned on Dirichlet 0.3{of_seeds(data)}: −1 where the flatter model is always "
        "the more accurate one, 0 where they have nothing to do with each other. Measured on "
        f"{data.samples('top', 'trace', 'gauss_newton', 'sharpness')}."
    )
    return Table("field-sharpness", "Sharpness and test accuracy", header, rows if data.models else [], note)


def correlation(data: Field, name: str, side: str) -> tuple[float | None, int]:
    """The rank correlation of a measure with accuracy on one of the `SIDES`, and of how many models."""
    pairs = [(headline(row), value) for row, value in _pairs(data, name) if SIDES[side](row["config"])]
    return spearman(pairs), len(pairs)


def scatter(data: Field) -> list[Picture]:
    """Test accuracy against the measures of the Hessian, a dot for each model."""
    pictures = []
    for name in ("hessian", "trace", "gauss-newton"):
        title = MEASURES[name].title
        pairs = [(row, value) for row, value in _pairs(data, name) if value > 0]
        if len(pairs) < 3:
            continue
        figure, axes = panel()
        dots = []
        for row, value in pairs:
            method = method_of(row["config"])
            tone = colour(method[0])
            fill = tone if method[1] else SHEET
            axes.plot(value, headline(row), "o", markersize=5, markerfacecolor=fill, markeredgecolor=tone)
            dots.append((value, headline(row), f"{method_title(*method)} {headline(row):.2f} %"))
        rho = spearman([(headline(row), value) for row, value in pairs])
        axes.set(title=f"ρ = {points(rho)}", xlabel=title, ylabel="test accuracy, %", xscale="log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        shown = f"The field: test accuracy against {title}"
        pictures.append(finish(f"field-{name}", shown, figure, {"points": dots}))
    return pictures


def caption(data: Field) -> str:
    """What these pictures show."""
    on = data.samples("top", "trace", "gauss_newton")
    return f"A dot for each tuned model, measured on {on}; open: plain, full: with MAN."


def mean_measure(data: Field, s: Series | None, name: str, form: str) -> str:
    """Its mean ± standard deviation over the models of a series."""
    runs = {identity(run) for run in s.runs} if s else set()
    values = [value for row, value in _pairs(data, name) if identity(row) in runs]
    return mean_std(values, form) if values else BLANK


def of_seeds(data: Field) -> str:
    """Of which seeds models were measured, for the end of a clause."""
    return f", {seeds_text(axes(row)['seed'] for row, _ in data.models)}" if data.models else ""


def _pairs(data: Field, name: str) -> list[tuple[ResultRow, float]]:
    found = ((row, MEASURES[name].of(measured)) for row, measured in data.models)
    return [(row, value) for row, value in found if value is not None]


def _sharpness(measured: Measurements, name: str) -> float | None:
    found = measured["sharpness"]["measures"].get(name) if "sharpness" in measured else None
    return found["value"] if found else None
