"""The paper's settings and sweeps by name, with the hyper-parameters it uses in each; and the sweeps of docs/field.md.

Whatever a preset does not set is the library's default, which is the paper's value.
"""

from __future__ import annotations

from fedman.config import Config, Hyper, Preset
from fedman.errors import UserError, nearest
from fedman.runs.grid import Grid, Sweep

ZETA = {"cifar10": 0.15, "cifar100": 0.15, "tiny-imagenet": 0.10}
"""The paper's ζ. A preset switches MAN on with it; zeta=0 gives the plain algorithm."""

PARTITIONS = ("dir0.3", "dir0.6", "iid")

SEEDS = ("0", "1", "2")

METHODS = ("fedavg", "fedsam", "fedasam", "feddyn", "feddc", "fedspeed")
"""The algorithms of the paper's tables, each with and without MAN."""


def paper_hyperparameters(config: Config) -> Hyper:
    """Hyper-parameters that the paper (or its authors' code, where the paper is silent) changes from their defaults."""
    iid, tiny, man = config.partition == "iid", config.dataset == "tiny-imagenet", config.zeta > 0
    if config.algorithm == "fedspeed" and iid:
        return {"rho": 0.01}
    if config.algorithm == "fedsam" and iid and tiny:
        return {"rho": 0.01 if man else 0.03}
    if config.algorithm == "fedasam" and iid and (tiny or man):
        return {"rho": 0.1}
    return {}


PRESETS: dict[str, Preset] = {
    f"{dataset}-{partition}": Preset({"dataset": dataset, "partition": partition, "zeta": zeta}, paper_hyperparameters)
    for dataset, zeta in ZETA.items()
    for partition in PARTITIONS
}
PRESETS["digits"] = Preset(
    {"dataset": "digits", "clients": 20, "participation": 0.25, "rounds": 100, "batch_size": 10, "zeta": 0.05},
    paper_hyperparameters,
)


_TEXT = {
    "dataset": "shakespeare", "cohort": "fixed", "rounds": 100, "epochs": 1, "batch_size": 10, "weight_decay": 0.0,
    "eval_every": 5,
}  # fmt: skip
PRESETS["shakespeare"] = Preset({**_TEXT, "model": "lstm", "lr": 0.8, "lr_schedule": "constant"})  # LEAF's settings
PRESETS["shakespeare-transformer"] = Preset(
    {**_TEXT, "model": "transformer", "optimizer": "adamw", "lr": 1e-3, "lr_schedule": "cosine", "warmup": 5}
)


def _grid(dataset: str, algorithms: tuple[str, ...], zetas: tuple[float, ...], **axes: tuple[str, ...]) -> Grid:
    shared = {"algorithm": algorithms, "partition": ("dir0.3",), "zeta": tuple(f"{zeta:g}" for zeta in zetas)}
    return Grid(PRESETS[f"{dataset}-dir0.3"], {**shared, "seed": ("0",), **axes})


def _table(dataset: str) -> Grid:
    """A table of the paper: 12 methods, 3 partitions, 3 seeds."""
    return _grid(dataset, METHODS, (0, ZETA[dataset]), partition=PARTITIONS, seed=SEEDS)


_SWEEPS: dict[str, tuple[Grid, ...]] = {
    "paper-cifar100": (_table("cifar100"),),
    "paper-tiny-imagenet": (_table("tiny-imagenet"),),
    "paper-cifar10": (_table("cifar10"),),
    "paper-zeta": (
        _grid("cifar100", ("fedavg",), (0, 0.05, 0.075, 0.1, 0.15, 0.3, 0.6, 1, 1.5, 3), seed=SEEDS),
    ),
    "paper-hessian": (_grid("cifar100", METHODS, (0, ZETA["cifar100"]), partition=("dir0.3", "dir0.6"), seed=SEEDS),),
    "paper-variants": (
        _grid("cifar100", METHODS, (0.15,), man_logits=("false",)),
        _grid("cifar100", ("fedsam", "fedasam"), (0.3,), partition=("dir0.3", "iid")),
        _grid("cifar100", ("fedavg", "feddc"), (0, 0.15), cohort=("fixed",)),
        _grid("cifar100", ("fedspeed",), (0, 0.15), stale_ascent=("true",)),
        _grid("cifar100", ("feddc",), (0, 0.15), decayed=("true",)),
        _grid("cifar100", ("fedasam",), (0,), partition=("iid",), rho=("0.1",)),
        _grid("cifar100", ("fedspeed",), (0, 0.15), partition=("dir0.3", "dir0.6"), rho=("0.01",)),
    ),
    "paper-tiny-variants": (
        _grid(
            "tiny-imagenet", ("fedavg", "feddyn", "feddc", "fedspeed"), (0.1,),
            man_variant=("tiny-code",), man_logits=("false",),
        ),
        _grid("tiny-imagenet", ("fedspeed",), (0.1,), partition=("dir0.6",), rho=("0.01",)),
    ),
}  # fmt: skip

TUNED: dict[str, dict[str, tuple[str, ...]]] = {
    "fedavg": {"lr": ("0.02", "0.03", "0.05", "0.1", "0.2", "0.3")},
    "fedsam": {"rho": ("0.05", "0.1", "0.2"), "lr": ("0.03", "0.1")},
    "fedasam": {"rho": ("0.2", "0.5", "1"), "lr": ("0.03", "0.1")},
    "feddyn": {"alpha": ("0.01", "0.03", "0.1"), "lr": ("0.03", "0.1")},
    "feddc": {"alpha": ("0.01", "0.03", "0.1"), "lr": ("0.03", "0.1")},
    "fedspeed": {"alpha": ("0.01", "0.1"), "rho": ("0.05", "0.1", "0.2")},
    "fedprox": {"mu": ("0.0001", "0.01", "0.1"), "lr": ("0.03", "0.1")},
    "scaffold": {"decayed": ("false", "true"), "lr": ("0.03", "0.1", "0.2")},
    "fedavgm": {"server_momentum": ("0.5", "0.8", "0.9"), "lr": ("0.03", "0.1")},
    "fedadam": {"server_lr": ("0.003", "0.01", "0.03"), "lr": ("0.03", "0.1")},
    "fedcm": {"alpha": ("0.1", "0.3", "0.6"), "lr": ("0.03", "0.1")},
    "mofedsam": {"alpha": ("0.1", "0.3", "0.6"), "rho": ("0.03", "0.1")},
    "fedgamma": {"rho": ("0.03", "0.1", "0.2"), "lr": ("0.03", "0.1")},
    "fedsmoo": {"alpha": ("0.01", "0.1"), "rho": ("0.05", "0.1", "0.2")},
    "fedlesam": {"rho": ("0.03", "0.1", "0.3"), "lr": ("0.03", "0.1")},
    "fedlesam-d": {"alpha": ("0.01", "0.1"), "rho": ("0.03", "0.1", "0.3")},
    "fedacg": {"server_momentum": ("0.5", "0.7", "0.85"), "lr": ("0.03", "0.1")},
    "fedgloss": {"alpha": ("0.01", "0.1"), "rho_local": ("0.05", "0.1", "0.2")},
}
"""The field: six settings of each algorithm, its defaults among them. Every method is tuned with as many runs."""

DECAYS = ("0.002", "0.004", "0.008")  # the paper's λ times 2, 4, 8


def _penalty(name: str, *zetas: float) -> Grid:
    return _grid("cifar100", ("fedavg", "feddc"), zetas, penalty=(name,), seed=SEEDS)


_SWEEPS |= {
    "residual": (
        Grid(
            Preset(
                {
                    **PRESETS["cifar100-dir0.3"].keys,
                    "model": "resnet18_gn",
                    "eval_every": 10,
                    "eval_others_every": 500,
                }
            ),
            {"algorithm": ("fedavg", "feddc"), "zeta": ("0", f"{ZETA['cifar100']:g}")},
        ),
    ),
    "field-tune": tuple(
        Grid(
            Preset({**PRESETS["cifar100-dir0.3"].keys, "eval_every": 25, "eval_others_every": 500}),
            {"algorithm": (name,), "zeta": ("0", f"{ZETA['cifar100']:g}"), **tried},
        )
        for name, tried in TUNED.items()
    ),
    "field": (
        _grid("cifar100", tuple(TUNED), (0, 0.15), partition=("dir0.3", "dir0.6"), seed=SEEDS),
        _grid("cifar100", tuple(TUNED), (0, 0.15), partition=("iid",)),
    ),
    "field-penalties": (
        _penalty("man-hidden", 0.15),
        _penalty("man-logits", 0.15),
        _penalty("activation-l1", 0.05, 0.15),
        _penalty("feddecorr", 0.1, 4.8),  # the paper's weight, and what the released code's 0.1 is with batches of 50
        _grid("cifar100", ("fedavg", "feddc"), (0,), weight_decay=DECAYS, seed=SEEDS),
    ),
}

SWEEPS = {name: Sweep(name, grids) for name, grids in _SWEEPS.items()}
"""The paper's tables and figures, the readings on which paper and code disagree (docs/paper.md), and the field."""


def find_preset(name: str | None) -> Preset | None:
    """The preset `name`; None if no preset is asked for."""
    if name is None:
        return None
    if name in SWEEPS:
        raise UserError(f"preset: {name!r} is a sweep of many runs; use fedman sweep --preset {name}")
    if name not in PRESETS:
        raise UserError(f"preset: no preset named {name!r}{nearest(name, PRESETS)}")
    return PRESETS[name]


def find_sweep(name: str | None) -> Preset | Sweep | None:
    """What a sweep starts from: a preset, a sweep of the paper, or nothing."""
    found: dict[str, Preset | Sweep] = {**PRESETS, **SWEEPS}
    if name is not None and name not in found:
        raise UserError(f"preset: no preset named {name!r}{nearest(name, found) or '; see fedman list'}")
    return found[name] if name is not None else None
