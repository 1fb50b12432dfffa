"""What the paper prints (`paper_targets.json`), and what its results are called."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

TITLES = {
    "cifar100": "CIFAR-100",
    "tiny-imagenet": "Tiny-ImageNet",
    "cifar10": "CIFAR-10",
    "digits": "Digits",
    "shakespeare": "Shakespeare",
}
PARTITIONS = {"dir0.3": "Dirichlet 0.3", "dir0.6": "Dirichlet 0.6", "iid": "iid"}
SWAPPED = {"dir0.3": "dir0.6", "dir0.6": "dir0.3", "iid": "iid"}
"""The CIFAR-10 columns read the other way round: all twelve rows are lower under the header of the easier split."""

_PRINTED = json.loads(resources.files("fedman.paper").joinpath("paper_targets.json").read_text(encoding="utf-8"))
TABLES = tuple(_PRINTED["accuracy"])
"""The data sets for which the paper has an accuracy table, in its order."""


@dataclass(frozen=True)
class Target:
    """A cell of an accuracy table: percent, its standard deviation, and the first round at the target."""

    accuracy: float
    std: float
    rounds: int | None


@dataclass(frozen=True)
class Sharpness:
    """A cell of a Hessian table. `doubt`: why the printed figure cannot be this row's own."""

    top: float
    trace: float
    doubt: str = ""


def target(dataset: str, partition: str, algorithm: str, man: bool) -> Target | None:
    """The paper's accuracy, where it gives one."""
    cell = _cell("accuracy", dataset, partition, algorithm)
    return Target(*cell["man" if man else "plain"]) if cell else None


def sharpness(dataset: str, partition: str, algorithm: str, man: bool) -> Sharpness | None:
    """The paper's largest Hessian eigenvalue and trace, where it gives them."""
    cell = _cell("hessian", dataset, partition, algorithm)
    if not cell:
        return None
    top, trace = cell["man" if man else "plain"]
    return Sharpness(top, trace, cell.get("doubt", ""))


def title(dataset: str) -> str:
    """A data set as the paper writes it."""
    return TITLES.get(dataset, dataset.removeprefix("npz:"))


def partition_title(partition: str) -> str:
    """A partition in words."""
    return PARTITIONS.get(partition, partition)


def _cell(table: str, dataset: str, partition: str, algorithm: str) -> dict[str, Any]:
    return _PRINTED[table].get(dataset, {}).get(partition, {}).get(algorithm, {})
