"""Means, marks, gains, rounds and tables against cases worked out by hand."""

import csv
import io
import math

import pytest
from report_rows import pair, row

from fedman.paper import targets as paper
from fedman.paper.report import narrative as words
from fedman.paper.report import tables
from fedman.paper.report.compare import ABOVE, BELOW, NONE, POINT, STD, boards
from fedman.paper.report.series import series


def board(rows):
    (one,) = boards(series(rows))
    return one


@pytest.mark.parametrize(
    ("mean", "difference", "mark"),
    [
        # the paper has 40.90 ± 0.62
        (40.90, "+0.00", STD),
        (41.52, "+0.62", STD),
        (40.28, "−0.62", STD),
        (41.53, "+0.63", POINT),
        (41.90, "+1.00", POINT),
        (39.90, "−1.00", POINT),
        (41.91, "+1.01", ABOVE),
        (39.89, "−1.01", BELOW),
        (math.nan, "–", BELOW),
    ],
)
def test_marks(mean, difference, mark):
    (cell,) = board([row(mean, zeta=0)]).cells
    assert tables.points(cell.difference) == difference
    assert cell.mark == mark


def test_mean_and_deviation_over_seeds():
    (cell,) = board([row(a, zeta=0, seed=i) for i, a in enumerate((40.0, 41.0, 43.0))]).cells
    assert cell.series.mean == pytest.approx(124 / 3)
    assert cell.series.std == pytest.approx(math.sqrt(7 / 3))
    curve = cell.series.curve
    assert curve.mean[-1] == pytest.approx(124 / 3)
    assert (curve.low[-1], curve.high[-1]) == (40.0, 43.0)
    assert tables.headline(board([row(a, zeta=0, seed=i) for i, a in enumerate((40.0, 41.0, 43.0))])).rows == [
        ["FedAvg", "41.33 ± 1.53 (40.90 ± 0.62) ●"]
    ]


@pytest.mark.parametrize(
    ("firsts", "shown", "ratio", "agrees"),
    [
        # FedDC needs 294 rounds in the paper
        ([294], "294", 1.0, True),
        ([300, None, 310], "310", 310 / 294, True),
        ([None, None, 310], "500+", None, False),
        ([353], "353", 353 / 294, False),
        ([352], "352", 352 / 294, True),
        ([100], "100", 100 / 294, True),
    ],
)
def test_rounds_to_target(firsts, shown, ratio, agrees):
    rows = [row(52.0, algorithm="feddc", zeta=0, seed=i, rounds_to_target=t) for i, t in enumerate(firsts)]
    (cell,) = board(rows).cells
    assert tables.reached(cell.series) == shown
    assert cell.rounds_ratio == (None if ratio is None else pytest.approx(ratio))
    assert cell.rounds_agree is agrees


def test_where_the_paper_never_gets_there():
    agree = [board([row(40.0, zeta=0, rounds_to_target=t)]).cells[0].rounds_agree for t in (None, 480, 300)]
    assert agree == [True, True, False]


def test_gains_beside_the_papers():
    found = board(
        [*pair(40.0, 51.5), *pair(52.0, 55.0, "feddc", partition="iid"), row(50.0, algorithm="feddyn", zeta=0)]
    )
    assert [(p.plain.series.method, p.gain) for p in found.pairs] == [("FedAvg", 11.5), ("FedDC", 3.0)]
    table = tables.gains(found)
    assert table.header == ["algorithm", "Dirichlet 0.3", "paper", "iid", "paper"]
    assert table.rows == [["FedAvg", "+11.50", "+11.10", "–", "–"], ["FedDC", "–", "–", "+3.00", "+3.52"]]
    said = words.about(found)
    assert said[1].startswith("MAN raises the accuracy in 2 of 2 pairs; the change is +3.00 (FedDC, iid) to +11.50")


def test_variants_and_other_zetas_stay_out_of_the_table():
    rows = [
        *pair(40.0, 52.0),
        row(51.0, man_logits=False),
        row(39.0, zeta=0, cohort="fixed"),
        row(53.0, zeta=0.3),
        row(52.5, zeta=0.6),
        row(51.0, algorithm="fedsam", zeta=0.3),
        row(44.0, algorithm="fedasam", zeta=0, partition="iid"),
        row(43.0, algorithm="fedasam", zeta=0, partition="iid", rho=0.1),
    ]
    found = board(rows)
    assert [(c.series.method, c.series.mean) for c in found.cells] == [
        ("FedAvg", 40.0), ("FedAvg+MAN", 52.0), ("FedASAM", 44.0),
    ]  # fmt: skip
    assert [[(s.zeta, s.mean) for s in line] for line in found.zeta_series()] == [
        [(0, 40.0), (0.15, 52.0), (0.3, 53.0), (0.6, 52.5)]
    ]
    assert [(words_, s.mean, usual and usual.series.mean) for words_, s, usual in found.variants()] == [
        ("cohort=fixed", 39.0, 40.0),
        ("man_logits=false", 51.0, 52.0),
        ("ζ=0.3", 51.0, None),
        ("rho=0.1", 43.0, 44.0),
    ]
    assert [r[6] for r in tables.variants(found).rows] == ["−1.00", "−1.00", "–", "−1.00"]


def test_one_seed_in_two_precisions_is_not_two_seeds():
    rows = [row(40.0, zeta=0), row(42.0, zeta=0, seed=1), row(50.0, zeta=0, precision="tf32")]
    rows[2]["config"]["precision"] = "tf32"
    found = board(rows)
    assert [c.series.accuracies for c in found.cells] == [[40.0, 42.0]]
    assert [s.departs for _, s, _ in found.variants()] == ["precision=tf32"]


def test_both_readings_of_the_cifar10_columns():
    found = board([row(80.0, dataset="cifar10", zeta=0), row(81.0, dataset="cifar10", zeta=0, partition="iid")])
    assert [r[2:] for r in tables.readings(found).rows] == [
        ["80.00", "80.19 ± 0.46", "−0.19", "79.34 ± 0.19", "+0.66"],
        ["81.00", "81.44 ± 0.43", "−0.44", "81.44 ± 0.43", "−0.44"],
    ]


def test_the_words_weigh_both_readings():
    def said(**where):
        return [text for text in words.about(board([row(80.0, zeta=0, **where)])) if "headers exchanged" in text]

    assert said(dataset="cifar10") == [
        "The Dirichlet cells are 0.19 points from the paper's on average as printed, 0.66 with its two Dirichlet "
        "headers exchanged; then 0 of 1 are more than a point below."
    ]
    assert not said(dataset="cifar10", partition="iid")
    assert not said()


def test_files_of_a_table():
    table = tables.accuracy(board([row(40.0, zeta=0), row(math.nan, algorithm="feddc", zeta=0, partition="dir0.6")]))
    lines = list(csv.reader(io.StringIO(table.csv())))
    assert lines[0][:6] == ["partition", "method", "accuracy", "std", "seeds", "rounds to target"]
    assert lines[1] == [
        "dir0.3",
        "FedAvg",
        "40.00",
        "",
        "1",
        "500+",
        "40.90",
        "0.62",
        "-0.90",
        "within 1 point",
        "500+",
    ]
    assert lines[2][2:4] == ["diverged", ""]
    text = table.markdown().splitlines()
    assert text[0] == "**CIFAR-100: accuracy**"
    assert text[3] == "| --- " * 11 + "|"
    assert len(text) == 8
    odd = tables.Table("x", "t", ["a|b"], [["c,d"]])
    assert "| a\\|b |" in odd.markdown()
    assert '"c,d"' in odd.csv()


def test_the_order_of_methods_is_compared():
    targets = [
        (a, man, paper.target("cifar100", "iid", a, man).accuracy)
        for a in ("fedavg", "fedsam", "fedasam", "feddyn", "feddc", "fedspeed")
        for man in (False, True)
    ]
    rows = [row(v, algorithm=a, zeta=0.15 if man else 0, partition="iid") for a, man, v in targets]
    assert any("1.00 (iid)" in text for text in words.about(board(rows)))
    rows = [row(100 - v, algorithm=a, zeta=0.15 if man else 0, partition="iid") for a, man, v in targets]
    assert any("-1.00 (iid)" in text for text in words.about(board(rows)))


def test_what_is_missing_is_said():
    some = boards(series(pair(40.0, 52.0)))
    said = words.missing(some, [])
    assert said[0].startswith("CIFAR-100: 34 of 36 cells: FedAvg (2), FedAvg+MAN (2), FedSAM (3)")
    assert said[1:] == ["Tiny-ImageNet: all of its 36 cells.", "CIFAR-10: all of its 36 cells.", "The Hessian."]
    assert words.missing(boards(series(pair(90.0, 91.0, dataset="digits"))), []) == []


def test_a_data_set_the_paper_does_not_have():
    found = board([r for s in (0, 1) for r in pair(90.0 + s, 94.0 + s, dataset="digits", seed=s)])
    assert {c.mark for c in found.cells} == {NONE}
    assert found.zeta == 0.05
    assert tables.headline(found).rows == [["FedAvg", "90.50 ± 0.71"], ["FedAvg+MAN", "94.50 ± 0.71"]]
    assert tables.rounds(found) is None
    assert {what: value for value, what in words.tiles([found])}["points, the median gain"] == "+4.00"


def test_the_papers_figures():
    """A few cells as printed; every table has all of its 36."""
    assert paper.target("cifar100", "dir0.3", "fedavg", False) == paper.Target(40.90, 0.62, None)
    assert paper.target("cifar100", "iid", "feddc", True) == paper.Target(56.77, 0.31, 156)
    assert paper.target("tiny-imagenet", "dir0.6", "fedspeed", True) == paper.Target(35.49, 0.07, 78)
    assert paper.target("cifar10", "dir0.6", "feddc", False) == paper.Target(83.10, 0.37, None)
    assert paper.sharpness("cifar100", "dir0.3", "fedsam", True) == paper.Sharpness(29.29, 2709)
    assert "copy" in paper.sharpness("cifar100", "dir0.6", "feddc", True).doubt
    assert paper.target("cifar100", "dir0.3", "scaffold", False) is None
    assert paper.target("digits", "dir0.3", "fedavg", False) is None
    for dataset in ("cifar100", "tiny-imagenet", "cifar10"):
        cells = [
            paper.target(dataset, p, a, man)
            for p in ("dir0.3", "dir0.6", "iid")
            for a in ("fedavg", "fedsam", "fedasam", "feddyn", "feddc", "fedspeed")
            for man in (False, True)
        ]
        assert all(cell and 20 < cell.accuracy < 90 for cell in cells)
