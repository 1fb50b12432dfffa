"""A picture three ways: PNG and SVG for files, and SVG in the page's colours, so that it is dark when the page is.

matplotlib draws everything, once. On the page its fixed colours become CSS variables, its groups get names that buttons
can hide, and the place of the axes is handed on so that a pointer can be turned into a value.
"""

from __future__ import annotations

import html
import io
import json
import re
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER = "#1f2430", "#6a7080", "#dfe2e8", "#ffffff"
METHOD = {
    "fedavg": "#2b6cb0",
    "fedsam": "#d9772b",
    "fedasam": "#0f8b8d",
    "feddyn": "#2f855a",
    "feddc": "#c53f4a",
    "fedspeed": "#7b4fb5",
    "fedprox": "#8a6d3b",
    "scaffold": "#5a6472",
}
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--sheet"}
VARIABLES |= {tone: f"--{method}" for method, tone in METHOD.items()}
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "svg.hashsalt": "fedman",
    "font.size": 9,
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
    """`inline` goes into the page, `svg` and `png` into files; `hover` says where a pointer is in terms of the data."""

    name: str
    title: str
    inline: str
    svg: bytes
    png: bytes
    hover: str


def colour(algorithm: str) -> str:
    """The colour of an algorithm, the same in every picture."""
    return METHOD.get(algorithm, MUTED)


def panel(width: float = 4.1, height: float = 3.1, **options: Any) -> tuple[Figure, Any]:
    """A figure with one pair of axes in a fixed place, in inches."""
    figure = Figure(figsize=(width, height))
    left, right, top, bottom = 0.5, 0.1, 0.3, 0.44
    place = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    return figure, figure.add_axes(place, **options)


def finish(name: str, title: str, figure: Figure, hover: dict[str, Any] | None = None) -> Picture:
    """Render. `hover`: what `page.js` needs beside the place of the axes, which is added here."""
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=150)
    if hover is not None:
        axes = figure.axes[0]
        width, height = (72 * side for side in figure.get_size_inches())
        place = axes.get_position()
        box = place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height
        hover = hover | {
            "box": [round(v, 2) for v in box],
            "xlim": list(axes.get_xlim()),
            "ylim": list(axes.get_ylim()),
            "xlog": axes.get_xscale() == "log",
            "ylog": axes.get_yscale() == "log",
        }
    inline = _inline(name, title, svg.getvalue().decode())
    data = json.dumps(hover, separators=(",", ":"), ensure_ascii=False, allow_nan=False) if hover else ""
    return Picture(name, title, inline, svg.getvalue(), png.getvalue(), data)


def styled() -> Any:
    """The context in which pictures are drawn."""
    return rc_context(STYLE)  # type: ignore[arg-type]


def _inline(name: str, title: str, svg: str) -> str:
    """The <svg> element alone: colours by variable, ids of its own, groups named for the buttons, no needless digit."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", svg, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg {box[0] if box else ""} role="img" aria-label="{html.escape(title)}">'
    svg = head + svg[svg.index(">") + 1 :]
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda m: f"var({VARIABLES[m[0]]})" if m[0] in VARIABLES else m[0], svg)
    svg = re.sub(r"font-family: [^;]*; ", "", svg)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', _shorter, svg)
    svg = re.sub(r'id="series:([\w.:-]+)"', lambda m: f'data-series="{m[1].replace(":", " ")}"', svg)
    svg = svg.replace('id="legend"', 'class="legend"')
    used = set(re.findall(r'(?:url\(#|xlink:href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'url\(#|xlink:href="#', lambda m: f"{m[0].removeprefix('xlink:')}{name}-", svg)
    return re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><").strip()


def _shorter(attribute: re.Match[str]) -> str:
    """Coordinates to a hundredth of a point."""
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", attribute[0])
