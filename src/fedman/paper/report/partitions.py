"""Who had which classes, for the pictures of the partitions; without the images, where labels alone decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedman.data import SPECS, is_npz, load, partition
from fedman.errors import UserError
from fedman.paper.report.compare import Board
from fedman.paper.report.curves import partition as draw
from fedman.paper.report.figure import Picture
from fedman.runs.records import axes

EVEN = ("cifar10", "cifar100", "tiny-imagenet")
"""Data sets with as many training samples of every class. A Dirichlet split draws from pools of a class, so that its
table of counts needs no more than that; so does iid by class, and a permutation of samples that are sorted by class."""


def pictures(board: Board) -> list[Picture]:
    """A picture for each partition of a board whose labels are known, on one scale."""
    found = []
    for name in board.partitions:
        config = axes(board.of(name)[0].series.runs[0])
        labels, classes = _labels(config)
        if labels is not None:
            seed, sigma = config.get("partition_seed", 0), config.get("unbalanced", 0.0)
            parts = partition.split(
                labels, name, config["clients"], classes=classes, dataset=config["dataset"], seed=seed, sigma=sigma
            )
            facts = partition.heterogeneity(labels, parts, classes)
            found.append((name, partition.table(labels, parts, classes), facts))
    most = max((int(counts.max()) for _, counts, _ in found), default=0)
    return [draw(board.dataset, name, counts, facts, most) for name, counts, facts in found]


def _labels(config: Mapping[str, Any]) -> tuple[np.ndarray | None, int]:
    name = config["dataset"]
    if name in EVEN:
        if name == "cifar10" and config["partition"] == "iid":
            return None, 0  # blocks of the files' own order
        spec = SPECS[name]
        return np.repeat(np.arange(spec.classes), spec.train // spec.classes), spec.classes
    if name == "digits" or is_npz(name):
        try:
            data = load(name)
        except UserError:
            return None, 0  # a user's file that is no longer there
        return data.y_train, data.classes
    return None, 0
