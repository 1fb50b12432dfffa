"""A picture of a partition: one row per class, one column per client, sizes of the clients on top."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedman.errors import UserError

FORMATS = (".png", ".svg")
MAX_BUBBLES = 900  # beyond that bubbles are specks and a heat map reads better
COLOUR = "#2f6f9f"


def draw(counts: np.ndarray, summary: dict[str, float], path: Path) -> Path:
    """Draw the table [clients, classes] of sample counts; few cells as bubbles, many as a heat map."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"picture: {path} must end in {' or '.join(FORMATS)}")
    import matplotlib
    from matplotlib.figure import Figure

    clients, classes = counts.shape
    figure = Figure(figsize=(np.clip(2 + clients * 0.22, 6, 12), np.clip(2 + classes * 0.22, 4, 9)))
    figure.set_layout_engine("constrained")
    top, main = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1, 5]})
    _sizes(top, counts.sum(1), summary)
    if counts.size <= MAX_BUBBLES:
        _bubbles(main, counts)
    else:
        figure.colorbar(_heat(main, counts), ax=main, label="samples", pad=0.01)
    main.set(xlabel="client", ylabel="class", xlim=(-0.6, clients - 0.4), ylim=(classes - 0.4, -0.6))
    main.locator_params(integer=True)
    main.spines[["top", "right"]].set_visible(False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "fedman"}):  # the same partition gives the same file
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise UserError(f"{path}: the picture cannot be written ({error.strerror or error})") from error
    return path


def _sizes(axes: Any, sizes: np.ndarray, summary: dict[str, float]) -> None:
    axes.bar(np.arange(len(sizes)), sizes, width=0.8 if len(sizes) <= 50 else 1.0, color=COLOUR, alpha=0.55)
    axes.set_ylabel("samples")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{len(sizes)} clients, {summary['classes']:.1f} classes each on average "
        f"(label perplexity {summary['perplexity']:.1f})",
        loc="left",
        fontsize=10,
    )


def _bubbles(axes: Any, counts: np.ndarray) -> None:
    k, c = np.nonzero(counts)
    share = counts[k, c] / counts.max()
    axes.scatter(k, c, s=180 * share, c=share, cmap="viridis_r", vmin=-0.2, vmax=1.2, linewidths=0)
    axes.grid(alpha=0.15)
    axes.set_axisbelow(True)


def _heat(axes: Any, counts: np.ndarray) -> Any:
    from matplotlib.colors import PowerNorm

    shown = np.ma.masked_equal(counts.T, 0)
    scale = PowerNorm(0.5, vmin=0, vmax=counts.max())  # a root scale: most cells hold few samples
    return axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="YlGnBu", norm=scale)
