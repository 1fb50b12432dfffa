"""The paper's settings by name, and the hyper-parameters it uses in each (protocol §4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_PAPER: dict[str, Any] = {
    "clients": 100,
    "participation": 0.1,
    "cohort": "bernoulli",
    "rounds": 500,
    "epochs": 5,
    "batch_size": 50,
    "lr": 0.1,
    "lr_decay": 0.998,
    "weight_decay": 1e-3,
    "clip": 10.0,
}

ZETA = {"cifar10": 0.15, "cifar100": 0.15, "tiny-imagenet": 0.10}
"""The paper's ζ. A preset switches MAN on with it; zeta=0 gives the plain algorithm."""

PRESETS: dict[str, dict[str, Any]] = {
    f"{dataset}-{partition}": {**_PAPER, "dataset": dataset, "partition": partition, "zeta": zeta}
    for dataset, zeta in ZETA.items()
    for partition in ("dir0.3", "dir0.6", "iid")
}
PRESETS["digits"] = {
    "dataset": "digits",
    "partition": "dir0.3",
    "clients": 20,
    "participation": 0.25,
    "rounds": 100,
    "epochs": 5,
    "batch_size": 10,
    "lr": 0.1,
    "lr_decay": 0.998,
    "zeta": 0.05,
}

METHODS = ("fedavg", "fedsam", "fedasam", "feddyn", "feddc", "fedspeed")
"""The algorithms of the paper's tables, each with and without MAN."""


@dataclass(frozen=True)
class Grid:
    """Runs over all combinations of the values of `axes`, on top of the preset `base`."""

    base: str
    axes: dict[str, tuple[str, ...]]


def _grid(dataset: str, algorithms: tuple[str, ...], zetas: tuple[float, ...], **axes: tuple[str, ...]) -> Grid:
    shared = {"algorithm": algorithms, "partition": ("dir0.3",), "zeta": tuple(f"{zeta:g}" for zeta in zetas)}
    return Grid(f"{dataset}-dir0.3", {**shared, "seed": ("0",), **axes})


def _table(dataset: str) -> Grid:
    """A table of the paper: 12 methods, 3 partitions, 3 seeds."""
    partitions = ("dir0.3", "dir0.6", "iid")
    return _grid(dataset, METHODS, (0, ZETA[dataset]), partition=partitions, seed=("0", "1", "2"))


SWEEPS: dict[str, tuple[Grid, ...]] = {
    "paper-cifar100": (_table("cifar100"),),
    "paper-tiny-imagenet": (_table("tiny-imagenet"),),
    "paper-cifar10": (_table("cifar10"),),
    "paper-zeta": (
        _grid("cifar100", ("fedavg",), (0, 0.05, 0.075, 0.1, 0.15, 0.3, 0.6, 1, 1.5, 3), seed=("0", "1", "2")),
    ),
    "paper-hessian": (_grid("cifar100", METHODS, (0, ZETA["cifar100"]), partition=("dir0.3", "dir0.6")),),
    "paper-variants": (
        _grid("cifar100", METHODS, (0.15,), man_logits=("false",)),
        _grid("cifar100", ("fedsam", "fedasam"), (0.3,), partition=("dir0.3", "iid")),
        _grid("cifar100", ("fedavg", "feddc"), (0, 0.15), cohort=("fixed",)),
        _grid("cifar100", ("fedspeed",), (0, 0.15), stale_ascent=("true",)),
        _grid("cifar100", ("feddc",), (0, 0.15), decayed=("true",)),
        _grid("cifar100", ("fedasam",), (0,), partition=("iid",), rho=("0.1",)),
    ),
    "paper-tiny-variants": (
        _grid(
            "tiny-imagenet", ("fedavg", "feddyn", "feddc", "fedspeed"), (0.1,),
            man_variant=("tiny-code",), man_logits=("false",),
        ),
        _grid("tiny-imagenet", ("fedspeed",), (0.1,), partition=("dir0.6",), rho=("0.01",)),
    ),
}  # fmt: skip
"""The paper's tables and figures, and the readings on which paper and code disagree (docs/paper.md)."""


def paper_hyperparameters(algorithm: str, dataset: str, partition: str, man: bool) -> dict[str, float]:
    """What the paper (or its authors' code, where the paper is silent) sets apart from an algorithm's defaults."""
    iid, tiny = partition == "iid", dataset == "tiny-imagenet"
    if algorithm == "fedspeed" and iid:
        return {"rho": 0.01}
    if algorithm == "fedsam" and iid and tiny:
        return {"rho": 0.01 if man else 0.03}
    if algorithm == "fedasam" and iid and (tiny or man):
        return {"rho": 0.1}
    return {}
