"""The paper's settings by name, and the hyper-parameters it uses in each (protocol §4)."""

from __future__ import annotations

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
