"""Figures of the partitions: how many samples of each class each client has."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, PowerNorm

from fedman.data import SPECS, is_path, load, partition, rules
from fedman.errors import UserError
from fedman.paper import targets as paper
from fedman.paper.report.compare import Comparison
from fedman.paper.report.figure import Picture, colour, finish, panel
from fedman.runs.records import Axes, axes

EVEN = ("cifar10", "cifar100", "tiny-imagenet")
"""Data sets with as many training samples of every class. A Dirichlet split draws from pools of a class, so that its
table of counts needs no more than that; so does iid by class, and a permutation of samples that are sorted by class."""


def pictures(data: Comparison) -> list[Picture]:
    """A figure for each partition of a data set whose labels are known, on one scale."""
    found = []
    for name in data.partitions:
        config = axes(data.of(name)[0].series.runs[0])
        try:
            counts = _counts(config, name)
        except UserError:
            continue  # a file that is no longer there, or another one by now; a partition of another version
        if counts is not None:
            found.append((name, counts))
    most = max((int(counts.max()) for _, counts in found), default=0)
    return [_heat_map(data, name, counts, most) for name, counts in found]


def _counts(config: Axes, name: str) -> np.ndarray | None:
    """The samples of each class at each client; None where a rule does not split the labels, or they are not known."""
    known = _labels(config) if rules.parse(name).kind in rules.RULES else None
    if known is None:
        return None
    labels, classes = known
    seed, sigma = config.get("partition_seed", 0), config.get("unbalanced", 0.0)
    iid = SPECS[config["dataset"]].iid if config["dataset"] in SPECS else "shuffled"
    parts = partition.split(labels, name, config["clients"], classes=classes, iid=iid, seed=seed, sigma=sigma)
    return partition.table(labels, parts, classes)


def _labels(config: Axes) -> tuple[np.ndarray, int] | None:
    """The training labels, without the images where every class has as many, and the number of classes."""
    name = config["dataset"]
    if name in EVEN:
        spec = SPECS[name]
        if config["partition"] == "iid" and spec.iid == "stored":
            return None  # depends on the order of the labels in the files
        return np.repeat(np.arange(spec.classes), spec.train // spec.classes), spec.classes
    if name != "digits" and not is_path(name):
        return None
    data = load(name)
    return (data.y_train, data.classes) if data.y_train.ndim == 1 and data.classes else None


def _heat_map(data: Comparison, name: str, counts: np.ndarray, most: int) -> Picture:
    """Samples of each class (row) at each client (column); the darkest shade is `most` samples."""
    clients, classes = counts.shape
    figure, axes = panel()
    tone = colour("fedavg")
    shades = LinearSegmentedColormap.from_list("clients", [(0, f"{tone}18"), (0.5, f"{tone}a0"), (1, f"{tone}ff")])
    shown = np.ma.masked_equal(counts.T, 0)
    axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=shades, norm=PowerNorm(0.5, 0, most))
    axes.grid(visible=False)
    axes.locator_params(integer=True)
    title = f"{paper.partition_title(name)}: {(counts > 0).sum(1).mean():.0f} classes per client"
    axes.set(title=title, xlabel="client", ylabel="class")
    return finish(
        *data.picture_of(name, "partition", f"{clients} clients, {classes} classes"), figure,
        {"grid": counts.T.tolist(), "rows": (0, classes - 1), "columns": (0, clients - 1), "value": "samples",
         "names": ("client", "class")},
    )  # fmt: skip
