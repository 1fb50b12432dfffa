"""The report's sentences."""

from fedman.paper import targets as paper
from fedman.paper.presets import SEEDS, SWEEPS
from fedman.paper.report import hessian, narrative, tables
from fedman.paper.report.compare import comparisons
from fedman.paper.report.series import series
from fedman.runs.grid import cells
from tests.paper.report.report_rows import compare, flatness, pair, row


def test_both_readings_of_the_cifar10_columns_are_weighed():
    def found(**where):
        return [
            text for text in narrative.dataset(compare([row(80.0, zeta=0, **where)])) if "headers exchanged" in text
        ]

    assert found(dataset="cifar10") == [
        "The 1 Dirichlet cells are 0.19 points from the paper's on average as printed (0 more than a point below, 0 "
        "above), 0.66 with its two Dirichlet headers exchanged (0 more than a point below, 0 above)."
    ]
    assert not found(dataset="cifar10", partition="iid")
    assert not found()


def test_the_order_of_methods_is_compared():
    targets = [
        (a, man, paper.target("cifar100", "iid", a, man).accuracy)
        for a in ("fedavg", "fedsam", "fedasam", "feddyn", "feddc", "fedspeed")
        for man in (False, True)
    ]
    rows = [row(v, algorithm=a, zeta=0.15 if man else 0, partition="iid") for a, man, v in targets]
    assert any("1.00 (iid)" in text for text in narrative.dataset(compare(rows)))
    rows = [row(100 - v, algorithm=a, zeta=0.15 if man else 0, partition="iid") for a, man, v in targets]
    assert any("-1.00 (iid)" in text for text in narrative.dataset(compare(rows)))


def test_rounds_and_differences_are_told_both_ways():
    firsts = {"feddc": 150, "fedspeed": 400, "fedavg": None, "feddyn": 480}  # the paper has 294, 392, 500+, 500+
    rows = [row(50.0, algorithm=a, zeta=0, rounds_to_target=t) for a, t in firsts.items()]
    rows += [row(60.0, algorithm="feddc", rounds_to_target=500)]  # 144
    text = " ".join(narrative.dataset(compare(rows)))
    assert (
        "Rounds to 50 %: of the 3 cells that reach it here and in the paper, 1 are within ±20 % of the paper's rounds, "
        "1 need fewer and 1 more (0.51 times, FedDC, Dirichlet 0.3, to 3.47 times, FedDC+MAN, Dirichlet 0.3); 1 reach "
        "it in neither; FedDyn, Dirichlet 0.3 only here."
    ) in text
    assert "Of 5 values of one seed 0 lie within the paper's standard deviation, 2 more within a point" in text
    assert "2 more than a point above and 1 more than a point below it." in text
    assert "The differences are −2.02 (FedDC, Dirichlet 0.3) to +9.10 (FedAvg, Dirichlet 0.3)." in text
    tiles = dict(narrative.tiles([compare(rows)]))
    assert tiles["2 of 5"] == "cells within a point of the paper (2 above that, 1 below)"


def test_the_cells_do_not_hide_other_zetas():
    def over_all(dataset, *accuracies):
        zetas = (0, 0.05, 0.1, 0.2)
        rows = [row(a, dataset=dataset, zeta=z) for z, a in zip(zetas, accuracies, strict=True)]
        return [text for text in narrative.dataset(compare(rows)) if text.startswith("Over all ζ")]

    where = "(FedAvg, Dirichlet 0.3)"
    assert over_all("digits", 80, 79, 81, 76) == [
        f"Over all ζ tried (0.05 to 0.2) MAN gains −4.00 to +1.00 points {where}."
    ]
    assert over_all("digits", 80, 79, 81, float("nan")) == [
        f"Over all ζ tried (0.05 to 0.2) MAN gains −1.00 to +1.00 points {where}; diverged: ζ = 0.2."
    ]
    nan = float("nan")
    assert over_all("digits", 80, nan, nan, nan) == [f"Over all ζ tried (0.05 to 0.2) MAN diverges {where}."]
    assert not over_all("digits", nan, 79, 81, 76)
    assert not over_all("cifar100", 40, 51, 52, 53)  # the paper says which ζ is that of the cells


def test_where_no_zeta_is_the_usual_one_all_that_were_tried_count():
    """The cells have the smallest, which is said; nothing is said of it alone."""
    rows = [row(a, dataset="digits", zeta=z) for z, a in ((0, 80.0), (0.3, 70.0), (0.05, 81.0))]
    found = compare(rows)
    text = " ".join(narrative.dataset(found))
    assert "one seed each, ζ = 0.05 (the smallest of 2 tried as often)." in text
    assert "MAN changes" not in text
    assert "Over all ζ tried (0.05 to 0.3) MAN gains −10.00 to +1.00 points (FedAvg, Dirichlet 0.3)." in text
    tiles = narrative.tiles([found])
    assert ("1 of 2", "pairs in which MAN gains; of Digits each ζ tried is one") in tiles
    assert tables.gains(found).note.startswith("ζ = 0.05 (the smallest of 2 tried as often); over the seeds that both")
    apart = compare(
        [*rows[:2], *(row(a, dataset="digits", algorithm="feddyn", zeta=z) for z, a in ((0, 60), (0.05, 61)))]
    )
    text = " ".join(narrative.dataset(apart))
    assert "Over all ζ tried (0.3) MAN gains −10.00 points (FedAvg, Dirichlet 0.3)." in text
    assert "Over all ζ tried (0.05) MAN gains +1.00 points (FedDyn, Dirichlet 0.3)." in text
    usual = compare([*rows, row(82.0, dataset="digits", zeta=0.05, seed=1)])
    assert not usual.ties
    assert ("1 of 1", "pairs in which MAN gains") in narrative.tiles([usual])


def test_missing_cells_are_named():
    some = [compare(pair(40.0, 52.0))]
    found = narrative.missing(some, [])
    assert found[0].startswith("CIFAR-100: 34 of 36 cells: FedAvg (2), FedAvg+MAN (2), FedSAM (3)")
    assert found[0].endswith("FedSpeed+MAN (3); 2 cells have fewer than 3 seeds.")
    assert found[1:] == [
        "Tiny-ImageNet: all of its 36 cells.",
        "CIFAR-10: all of its 36 cells.",
        "Hessian: all of its 24 cells.",
        "The Hessian's blocks by layer: all of its 24 cells.",
        "The clients' λ_max: all of its 24 cells.",
        "Sweep paper-zeta: 28 of 30 runs with committed code.",
        "Sweep paper-variants: 69 of 69 runs with committed code.",
        "Sweep paper-tiny-variants: 15 of 15 runs with committed code.",
    ]
    assert narrative.missing([compare(pair(90.0, 91.0, dataset="digits"))], []) == []


def test_missing_hessians_and_seeds_are_named():
    whole = [
        row(50.0, algorithm=a, zeta=z, partition=p, seed=s)
        for a in ("fedavg", "fedsam", "fedasam", "feddyn", "feddc", "fedspeed")
        for z in (0, 0.15)
        for p in ("dir0.3", "dir0.6", "iid")
        for s in range(3)
    ]
    records = [
        flatness(c["algorithm"], c["zeta"], partition=c["partition"], seed=c["seed"])
        for c in (run["config"] for run in whole)
        if c["partition"] != "iid" and (c["algorithm"], c["seed"]) != ("feddc", 2)
    ]
    for record in records[:2]:
        del record["models"]["all"]["layers"]
    found = narrative.missing([compare(whole)], hessian.merge(records))
    assert found[2:5] == [
        "Hessian: 4 cells have fewer than 3 seeds.",
        "The Hessian's blocks by layer: 5 cells have fewer than 3 seeds.",
        "The clients' λ_max: 4 cells have fewer than 3 seeds.",
    ]
    few = narrative.missing([compare(whole)], hessian.merge(records[:2]))
    assert few[3] == "The Hessian's blocks by layer: all of its 24 cells."
    assert few[4].startswith("The clients' λ_max: 23 of 24 cells: FedAvg (1), FedAvg+MAN (2)")


def test_nothing_is_missing_when_every_sweep_of_the_paper_was_run():
    """Runs that no commit explains are missing all the same."""
    names = ("cifar100", "tiny-imagenet", "cifar10", "zeta", "variants", "tiny-variants")
    whole = [made(cell.config) for name in names for cell in cells({"seed": SEEDS}, SWEEPS[f"paper-{name}"])]
    records = [
        flatness(c.algorithm, c.zeta, partition=c.partition, seed=c.seed)
        for c in (cell.config for cell in cells({}, SWEEPS["paper-hessian"]))
    ]
    assert narrative.missing(comparisons(series(whole)), hessian.merge(records)) == []
    whole[-1]["source"] = {"commit": "c" * 40, "changed": True}
    (text,) = narrative.missing(comparisons(series(whole)), hessian.merge(records))
    assert text == "Sweep paper-tiny-variants: 1 of 15 runs with committed code."


def made(config):
    return {**row(50.0), "config": config.flat()}


def test_how_the_models_of_a_pair_stand():
    records = [flatness(a, z, seed=s) for a, s in (("fedavg", 0), ("fedsam", 1)) for z in (0.0, 0.15)]
    for record, loss in zip(records, ((1.0, 0.5), (1.1, 1.0), (1.0, 0.5), (0.75, 1.5)), strict=True):
        record["models"]["all"]["loss"] = dict(zip(("value", "gradient_norm"), loss, strict=True))
    text = (
        "MAN changes the training loss by −0.25 to +0.1 and makes its gradient 2.0 to 3.0 times as long (2 pairs): "
        "part of the difference in sharpness may come from that."
    )
    assert text in narrative.flatness(hessian.merge(records))
    for record in records:
        del record["models"]["all"]["loss"]
    assert not any("training loss" in told for told in narrative.flatness(hessian.merge(records)))
