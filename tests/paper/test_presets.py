"""Presets and sweeps of the paper: their settings, their runs, and how keys choose among them."""

from collections import Counter

import pytest

from fedman.config import resolve
from fedman.errors import UserError
from fedman.paper.presets import METHODS, PRESETS, SWEEPS, find_preset, find_sweep
from fedman.runs.grid import cells

PAPER = {
    "clients": 100, "participation": 0.1, "cohort": "bernoulli", "rounds": 500, "epochs": 5, "batch_size": 50,
    "lr": 0.1, "lr_decay": 0.998, "weight_decay": 1e-3, "clip": 10.0,
}  # fmt: skip
DIGITS = PAPER | {"clients": 20, "participation": 0.25, "rounds": 100, "batch_size": 10}


def test_text_has_the_settings_of_leaf():
    config = resolve({}, PRESETS["shakespeare"])
    assert (config.model, config.task, config.partition, config.clients) == ("lstm", "language-model", "natural", 99)
    assert (config.lr, config.lr_schedule, config.zeta) == (0.8, "constant", 0.0)
    assert (config.epochs, config.batch_size) == (1, 10)
    assert resolve({}, PRESETS["shakespeare-transformer"]).optimizer == "adamw"


@pytest.mark.parametrize("name", [name for name in PRESETS if "shakespeare" not in name])
def test_settings_of_presets(name):
    dataset, _, partition = name.rpartition("-") if name != "digits" else ("digits", "", "dir0.3")
    zeta = {"digits": 0.05, "cifar10": 0.15, "cifar100": 0.15, "tiny-imagenet": 0.1}[dataset]
    expected = {**(DIGITS if name == "digits" else PAPER), "dataset": dataset, "partition": partition, "zeta": zeta}
    flat = resolve({}, PRESETS[name]).flat()
    assert {key: flat[key] for key in expected} == expected


@pytest.mark.parametrize(("name", "zeta"), [("cifar100", 0.15), ("cifar10", 0.15), ("tiny-imagenet", 0.1)])
def test_a_table_of_the_paper_is_108_runs(name, zeta):
    grid = cells({}, SWEEPS[f"paper-{name}"])
    assert len({cell.name for cell in grid}) == len(grid) == 12 * 3 * 3
    kinds = Counter((c.config.algorithm, c.config.zeta, c.config.partition) for c in grid)
    assert set(kinds.values()) == {3}
    assert {a for a, _, _ in kinds} == set(METHODS)
    assert {z for _, z, _ in kinds} == {0.0, zeta}
    assert {(c.config.dataset, c.config.rounds, c.config.cohort) for c in grid} == {(name, 500, "bernoulli")}
    assert [c.config.seed for c in grid] == sorted(c.config.seed for c in grid), "seed 0 of all cells comes first"


@pytest.mark.parametrize(
    ("sweep", "keys", "rho"),
    [
        ("paper-cifar100", "fedsam dir0.3 0.15", 0.05),
        ("paper-cifar100", "fedasam dir0.6 0.15", 0.5),
        ("paper-cifar100", "fedasam iid 0.15", 0.1),
        ("paper-cifar100", "fedasam iid 0", 0.5),
        ("paper-cifar100", "fedspeed dir0.3 0", 0.1),
        ("paper-cifar100", "fedspeed iid 0.15", 0.01),
        ("paper-tiny-imagenet", "fedsam iid 0", 0.03),
        ("paper-tiny-imagenet", "fedsam iid 0.1", 0.01),
        ("paper-tiny-imagenet", "fedasam iid 0", 0.1),
        ("paper-cifar10", "fedasam iid 0", 0.5),
    ],
)
def test_every_run_has_the_papers_hyperparameters(sweep, keys, rho):
    algorithm, partition, zeta = keys.split()
    grid = cells({"algorithm": algorithm, "partition": partition, "zeta": zeta}, SWEEPS[sweep])
    assert len(grid) == 3
    assert {cell.config.hyper["rho"] for cell in grid} == {rho}


def test_keys_choose_a_part_whose_runs_keep_their_names():
    whole = {cell.name: cell for cell in cells({"precision": "bf16"}, SWEEPS["paper-cifar100"])}
    part = cells(
        {"algorithm": "fedsam,feddc", "zeta": "0.150", "seed": "0", "precision": "bf16"}, SWEEPS["paper-cifar100"]
    )
    assert [cell.name for cell in part] == [
        f"{a}-{p}-zeta0.15-seed0" for a in ("fedsam", "feddc") for p in ("dir0.3", "dir0.6", "iid")
    ]
    assert all(whole[cell.name] == cell for cell in part)
    assert {cell.config.precision for cell in part} == {"bf16"}


def test_more_seeds_than_the_papers_are_allowed():
    assert [c.name for c in cells({"seed": "7", "algorithm": "fedavg", "zeta": "0"}, SWEEPS["paper-hessian"])] == [
        "fedavg-dir0.3-zeta0-seed7",
        "fedavg-dir0.6-zeta0-seed7",
    ]


def test_hessians_are_measured_of_three_seeds():
    grid = cells({}, SWEEPS["paper-hessian"])
    assert len({cell.name for cell in grid}) == len(grid) == 12 * 2 * 3


def test_the_zeta_sweep_covers_the_papers_range():
    zetas = sorted({cell.config.zeta for cell in cells({}, SWEEPS["paper-zeta"])})
    assert zetas[:2] == [0.0, 0.05]
    assert zetas[-1] == 3.0
    assert {0.075, 0.15, 0.3, 0.6} < set(zetas)


def test_variants_are_told_apart():
    grid = cells({}, SWEEPS["paper-variants"])
    assert len({cell.name for cell in grid}) == len(grid) == 6 + 4 + 4 + 2 + 2 + 1 + 4
    assert [c.name for c in cells({"stale_ascent": "true"}, SWEEPS["paper-variants"])] == [
        "fedspeed-dir0.3-zeta0-seed0-stale_ascenttrue",
        "fedspeed-dir0.3-zeta0.15-seed0-stale_ascenttrue",
    ]
    slow = cells({"rho": "0.01"}, SWEEPS["paper-variants"])
    assert {(c.config.algorithm, c.config.partition, c.config.zeta) for c in slow} == {
        ("fedspeed", partition, zeta) for partition in ("dir0.3", "dir0.6") for zeta in (0, 0.15)
    }
    *terms, ascent = cells({}, SWEEPS["paper-tiny-variants"])
    assert {(c.config.man_variant, c.config.man_logits, c.config.zeta) for c in terms} == {("tiny-code", False, 0.1)}
    assert ascent.name == "fedspeed-dir0.6-zeta0.1-seed0-rho0.01"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"algorithm": "fedprox"}, "algorithm: 'fedprox' is no part of paper-variants; it has fedavg"),
        ({"zeta": "0.2"}, "zeta: 0.2 is no part of paper-variants; it has 0.15, 0.3, 0"),
        ({"zeta": "much"}, "zeta: should be a number"),
        ({"algorithm": "fedavg", "stale_ascent": "true"}, "none of its runs has algorithm=fedavg stale_ascent=true"),
        ({"seed": "-1"}, "seed: should be greater"),
        ({"seed": "0,0"}, "seed: a value stands twice"),
        ({"zetta": "0"}, "zetta: no such key; did you mean zeta?"),
        ({"mu": "0.1"}, "mu: fedavg has no such hyper-parameter"),
    ],
)
def test_keys_that_choose_nothing(keys, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        cells(keys, SWEEPS["paper-variants"])


def test_names_of_presets():
    assert find_preset(None) is find_sweep(None) is None
    assert find_preset("digits") is find_sweep("digits") is PRESETS["digits"]
    assert find_sweep("paper-zeta") is SWEEPS["paper-zeta"]
    with pytest.raises(UserError, match=r"^preset: no preset named 'cifar100'; did you mean cifar100-iid\?$"):
        find_preset("cifar100")
    with pytest.raises(UserError, match=r"^preset: 'paper-zeta' is a sweep of many runs; use fedman sweep --preset"):
        find_preset("paper-zeta")
    with pytest.raises(UserError, match="did you mean paper-cifar100"):
        find_sweep("paper-cifar-100")
    for sweep in SWEEPS.values():
        assert cells({"seed": "0"}, sweep)
