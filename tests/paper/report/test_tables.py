"""Tables as rows, as CSV and as Markdown."""

import csv
import io
import math

from fedman.paper.report import narrative, tables
from tests.paper.report.report_rows import compare, pair, row


def test_headline_has_the_papers_figure_in_brackets():
    rows = [row(a, zeta=0, seed=i) for i, a in enumerate((40.0, 41.0, 43.0))]
    assert tables.headline(compare(rows)).rows == [["FedAvg", "41.33 ± 1.53 (40.90 ± 0.62) ●"]]


def test_gains_beside_the_papers():
    found = compare(
        [*pair(40.0, 51.5), *pair(52.0, 55.0, "feddc", partition="iid"), row(50.0, algorithm="feddyn", zeta=0)]
    )
    assert [(p.plain.series.method, p.gain) for p in found.pairs] == [("FedAvg", 11.5), ("FedDC", 3.0)]
    table = tables.gains(found)
    assert table.header == ["algorithm", "Dirichlet 0.3", "paper", "iid", "paper"]
    assert table.rows == [["FedAvg", "+11.50", "+11.10", "–", "–"], ["FedDC", "–", "–", "+3.00", "+3.52"]]
    assert narrative.dataset(found)[1].startswith(
        "MAN raises the accuracy in 2 of 2 pairs; the change is +3.00 (FedDC, iid) to +11.50"
    )


def test_pairs_that_diverge_with_man_are_not_left_out():
    nan = math.nan
    found = compare(
        [*pair(40.0, 51.5), *pair(52.0, nan, "feddc"), *pair(50.0, nan, "feddyn"), *pair(nan, 44.0, "fedsam")]
    )
    gains = (
        "MAN raises the accuracy in 1 of 3 pairs and diverges in 2; the change is +11.50 points (FedAvg, Dirichlet 0.3)"
    )
    assert narrative.dataset(found)[1] == f"{gains}; in the paper +11.10."
    tiles = narrative.tiles([found])
    assert ("1 of 3", "pairs in which MAN gains; it diverges in 2") in tiles
    assert ("+11.50", "points, the median gain of the 1 that did not diverge") in tiles
    assert [line[1] for line in tables.gains(found).rows] == ["+11.50", "–", "diverges†", "diverges†"]
    assert narrative.dataset(compare(pair(52.0, nan, "feddc")))[1] == "MAN diverges in 1 of 1 pair."


def test_a_gain_is_over_the_seeds_that_both_have():
    found = compare([row(a, zeta=0, seed=i) for i, a in enumerate((40.0, 41.0, 46.0))] + [row(50.0, seed=1)])
    assert [p.gain for p in found.pairs] == [9.0]
    apart = compare([row(40.0, zeta=0, seed=0), row(50.0, seed=1)])
    assert [p.gain for p in apart.pairs] == [None]
    assert narrative.dataset(apart)[1] == "No pair of plain and MAN can be compared."
    assert [what for _, what in narrative.tiles([apart])] == [
        "runs",
        "cells within a point of the paper (0 above that, 1 below)",
    ]


def test_both_readings_of_the_cifar10_columns():
    found = compare([row(80.0, dataset="cifar10", zeta=0), row(81.0, dataset="cifar10", zeta=0, partition="iid")])
    assert [r[2:] for r in tables.readings(found).rows] == [
        ["80.00", "80.19 ± 0.46", "−0.19", "79.34 ± 0.19", "+0.66"],
        ["81.00", "81.44 ± 0.43", "−0.44", "81.44 ± 0.43", "−0.44"],
    ]


def test_files_of_a_table():
    table = tables.accuracy(compare([row(40.0, zeta=0), row(math.nan, algorithm="feddc", zeta=0, partition="dir0.6")]))
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


def test_figures_of_code_that_is_in_no_commit_are_marked():
    rows = [*pair(40.0, 52.0, rounds_to_target=84), row(51.0, man_logits=False)]
    del rows[1]["source"]
    found = compare(rows)
    shown = {t.name: (t.rows, t.note) for t in (tables.headline(found), tables.rounds(found), tables.gains(found),
                                                tables.variants(found))}  # fmt: skip
    assert all(note.endswith("† with a run of code that is in no commit.") for _, note in shown.values())
    assert [row[1] for row in shown["cifar100-rounds"][0]] == ["84", "84†"]
    assert shown["cifar100-gain"][0] == [["FedAvg", "+12.00†", "+11.10"]]
    assert shown["cifar100-variants"][0][0][3:7] == ["51.00", "1", "52.00†", "−1.00"]
    assert [row[1][:6] for row in shown["cifar100-headline"][0]] == ["40.00 ", "52.00†"]
