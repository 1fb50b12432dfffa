"""A picture of a partition: samples of each class (row) at each client (column), the clients' sizes on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedman.data.partition import heterogeneity, table
from fedman.errors import UserError

FORMATS = (".png", ".svg")
COLUMNS = 1000  # at most; of more clients neighbours are averaged


def draw(labels: np.ndarray, parts: Sequence[np.ndarray], classes: int, path: Path) -> None:
    """Draw clients with the sample indices `parts` to a file; the same partition gives the same bytes."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UserError(f"picture: {path} must end in {' or '.join(FORMATS)}")
    import matplotlib
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    counts, facts = table(labels, parts, classes), heterogeneity(labels, parts, classes)
    clients, sizes = len(parts), np.array([len(part) for part in parts])
    group = -(-clients // COLUMNS)
    if group > 1:
        starts = np.arange(0, clients, group)
        members = np.diff([*starts, clients])
        counts = np.add.reduceat(counts, starts) / members[:, None]
        sizes = np.add.reduceat(sizes, starts) / members
    figure = Figure(figsize=(np.clip(2 + clients * 0.22, 6, 12), np.clip(2 + classes * 0.22, 4, 9)))
    figure.set_layout_engine("constrained")
    top, main = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1, 5]})
    top.bar(
        np.arange(len(sizes)) * group,
        sizes,
        width=0.8 if clients <= 50 else group,
        color="#2f6f9f",
        alpha=0.55,
    )
    top.set_ylabel("samples")
    top.set_title(
        f"{clients} clients, {facts['classes']:.1f} classes each on average "
        f"(label perplexity {facts['perplexity']:.1f})",
        loc="left",
        fontsize=10,
    )
    shown = np.ma.masked_equal(counts.T, 0)
    scale = PowerNorm(0.5, vmin=0, vmax=counts.max())  # a root scale: most cells hold few samples
    extent = (-group / 2, (len(sizes) - 0.5) * group, classes - 0.5, -0.5)
    image = main.imshow(shown, aspect="auto", interpolation="nearest", cmap="YlGnBu", norm=scale, extent=extent)
    figure.colorbar(image, ax=main, label="samples", pad=0.01)
    main.set(xlabel="client" if group == 1 else f"client (means of {group} neighbours)", ylabel="class")
    main.locator_params(integer=True)
    for axes in (top, main):
        axes.spines[["top", "right"]].set_visible(False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "fedman"}):
            figure.savefig(path, dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
    except OSError as error:
        raise UserError(f"{path}: the picture cannot be written ({error.strerror or error})") from error
