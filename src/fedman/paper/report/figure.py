"""Figures, drawn once by matplotlib: PNG and SVG files, and the same SVG as a part of the page.

On the page the colours are CSS variables with a light and a dark value, and groups with a gid become elements with
`data-series`, which buttons hide.
"""

from __future__ import annotations

import colorsys
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from fedman.paper.report.series import Setting, algorithms_of, method_title, part_title, penalties_of, slug

COLOURS = {
    "sheet": ("#ffffff", "#1b1e26"),
    "ink": ("#1f2430", "#e7e9ee"),
    "muted": ("#646b7b", "#9aa1b1"),
    "rule": ("#dfe2e8", "#323743"),
    "fedavg": ("#2b6cb0", "#6aa5e8"),
    "fedsam": ("#d9772b", "#f0a060"),
    "fedasam": ("#0f8b8d", "#4cc3c4"),
    "feddyn": ("#2f855a", "#68c290"),
    "feddc": ("#c53f4a", "#f07f87"),
    "fedspeed": ("#7b4fb5", "#b796e8"),
    "fedprox": ("#8a6d3b", "#cbab74"),
    "scaffold": ("#5a6472", "#a2adbd"),
    "fedavgm": ("#a8328f", "#e58fd0"),
    "fedadam": ("#1c7ca8", "#6bbfe6"),
    "fedcm": ("#73771e", "#c2c65a"),
    "mofedsam": ("#a0482d", "#dd9a78"),
    "fedgamma": ("#1f3a8a", "#8aa4f0"),
    "fedsmoo": ("#5f9e2f", "#a5d977"),
    "fedlesam": ("#b0316a", "#ef8cb8"),
    "fedlesam-d": ("#8b4fa0", "#d09fe0"),
    "fedacg": ("#006d77", "#5cc7d0"),
    "fedgloss": ("#b98300", "#e8c050"),
}
"""Name of a colour, which is also its CSS variable: its value on a light and on a dark page."""

OTHER_TONES = tuple(
    tuple(f"#{''.join(f'{round(255 * v):02x}' for v in colorsys.hls_to_rgb(hue / 24, light, 0.55))}" for light in pair)
    for pair in ((0.37, 0.70), (0.26, 0.80))
    for hue in range(24)
)
"""Colours of algorithms that have none above, on a light and on a dark page: an algorithm's depends on its name."""

LINES = ("solid", (0, (1, 1.2)), (0, (7, 1.5, 1, 1.5)))
"""Of the penalties in a figure, in their order; dashed is the plain algorithm."""

SHEET, INK, MUTED, RULE = (COLOURS[name][0] for name in ("sheet", "ink", "muted", "rule"))
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@dataclass(frozen=True)
class Picture:
    """A figure in its three forms; `hover` is a JSON text, empty where there is nothing for the pointer."""

    name: str
    title: str
    inline: str
    svg: bytes
    png: bytes
    hover: str


def tones(algorithm: str) -> tuple[str, ...]:
    """The colour of an algorithm on a light and on a dark page, the same in every report."""
    return COLOURS.get(algorithm) or OTHER_TONES[crc32(algorithm.encode()) % len(OTHER_TONES)]


def colour(algorithm: str) -> str:
    """The colour of an algorithm in a figure's file."""
    return tones(algorithm)[0]


def key(name: str) -> str:
    """The name of an algorithm or a penalty as a CSS variable and for buttons."""
    return slug(name).replace(".", "-")


def buttons(drawn: Sequence[Setting]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """For the algorithms and for the penalties that are drawn: what each button hides, and its label."""
    algorithms = [(key(name), method_title(name)) for name in algorithms_of(drawn)]
    return algorithms, [(key(name), part_title("penalty", name)) for name in penalties_of(drawn)]


def panel(width: float = 4.1, height: float = 3.1, **options: Any) -> tuple[Figure, Any]:
    """A figure with one pair of axes in a fixed place, in inches."""
    figure = Figure(figsize=(width, height))
    left, right, top, bottom = 0.56, 0.14, 0.3, 0.44
    place = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    return figure, figure.add_axes(place, **options)


def draw_curve(
    axes: Any,
    of: Setting,
    x: np.ndarray,
    y: np.ndarray,
    penalties: Sequence[str],
    width: float = 1.5,
    band: Sequence[np.ndarray] = (),
) -> None:
    """Draw a method's curve, dashed without a penalty, and the band between two others.

    `penalties` are those of the figure's curves; each has a line of its own.
    """
    series = f"{key(of.algorithm)} {key(of.penalty) if of.penalty else 'plain'}"
    line = penalties.index(of.penalty) % len(LINES) if of.penalty in penalties else 0
    style: dict[str, Any] = {"linestyle": LINES[line] if of.penalty else (0, (4, 2))}
    tone, width = colour(of.algorithm), width if of.penalty else 0.75 * width
    axes.plot(x, y, color=tone, label=of.method, gid=series, linewidth=width, **style)
    if band:
        axes.fill_between(x, *band, color=tone, alpha=0.18, linewidth=0, gid=series)


def finish(name: str, title: str, figure: Figure, hover: Mapping[str, object] | None = None) -> Picture:
    """Render a figure with one pair of axes.

    The pointer (`page.js`) shows the curves of `draw_curve`, else what `hover` has: `points` with a text each, or a
    `grid` of values with the places of its first and last `rows` and `columns`.
    """
    svg, png = io.BytesIO(), io.BytesIO()
    with rc_context({"svg.hashsalt": name}):  # reproducible ids that no other figure of the page has
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    figure.savefig(png, format="png", dpi=150)
    axes = figure.axes[0]
    lines = [_values(line) for line in axes.lines if line.get_gid()]
    hover = {"lines": lines, "x": axes.get_xlabel()} if lines else hover
    data = ""
    if hover is not None:
        width, height = (72 * side for side in figure.get_size_inches())
        place = axes.get_position()
        box = place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height
        placed = {
            **hover,
            "box": [round(v, 2) for v in box],
            "xlim": axes.get_xlim(),
            "ylim": axes.get_ylim(),
            "xlog": axes.get_xscale() == "log",
            "ylog": axes.get_yscale() == "log",
        }
        data = json.dumps(placed, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Picture(name, title, _inline(svg.getvalue().decode()), svg.getvalue(), png.getvalue(), data)


def _values(line: Any) -> dict[str, object]:
    x, y = line.get_data()
    rounded = {"x": [round(float(v), 3) for v in x], "y": [float(f"{v:.4g}") for v in y]}
    return {"label": line.get_label(), "series": line.get_gid(), **rounded}


def _inline(svg: str) -> str:
    """The <svg> element for the page. matplotlib numbers its own groups: `line2d_3`; those ids are dropped."""
    svg = svg[svg.index("<svg") :]
    for name, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{name})")
    for light, dark in OTHER_TONES:
        svg = svg.replace(light, f"light-dark({light}, {dark})")
    svg = re.sub(r'<g id="[\w.]+_\d+"', "<g", svg)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)  # a hundredth of a point
    return svg.replace("<g id=", "<g data-series=")
