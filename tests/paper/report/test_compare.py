"""Marks, rounds, gains and variants against cases worked out by hand."""

import math

import pytest

from fedman.paper.report import narrative, tables
from fedman.paper.report.compare import ABOVE, BELOW, NONE, POINT, STD, comparisons
from fedman.paper.report.series import series
from tests.paper.report.report_rows import compare, pair, row


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
    (cell,) = compare([row(mean, zeta=0)]).cells
    assert tables.points(cell.difference) == difference
    assert cell.mark == mark


@pytest.mark.parametrize(
    ("firsts", "shown", "ratio", "mark"),
    [
        # FedDC needs 294 rounds in the paper
        ([294], "294", 1.0, STD),
        ([300, None, 310], "310", 310 / 294, STD),
        ([None, None, 310], "500+", None, BELOW),
        ([353], "353", 353 / 294, BELOW),
        ([352], "352", 352 / 294, STD),
        ([236], "236", 236 / 294, STD),
        ([235], "235", 235 / 294, ABOVE),
        ([100], "100", 100 / 294, ABOVE),
    ],
)
def test_rounds_to_target(firsts, shown, ratio, mark):
    rows = [row(52.0, algorithm="feddc", zeta=0, seed=i, rounds_to_target=t) for i, t in enumerate(firsts)]
    (cell,) = compare(rows).cells
    assert tables.rounds_text(cell.series) == shown
    assert cell.rounds_ratio == (None if ratio is None else pytest.approx(ratio))
    assert cell.rounds_mark == mark


def test_rounds_where_the_paper_never_reaches_the_target():
    marks = [compare([row(40.0, zeta=0, rounds_to_target=t)]).cells[0].rounds_mark for t in (None, 480, 300)]
    assert marks == [STD, ABOVE, ABOVE]


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
    found = compare(rows)
    assert [(c.series.method, c.series.mean) for c in found.cells] == [
        ("FedAvg", 40.0), ("FedAvg+MAN", 52.0), ("FedASAM", 44.0),
    ]  # fmt: skip
    assert [[(s.zeta, s.mean) for s in line] for line in found.zeta_studies()] == [
        [(0, 40.0), (0.15, 52.0), (0.3, 53.0), (0.6, 52.5)]
    ]
    assert [(changes, s.mean, usual and usual.series.mean) for changes, s, usual in found.variants()] == [
        ("cohort=fixed", 39.0, 40.0),
        ("man_logits=false", 51.0, 52.0),
        ("ζ=0.3", 51.0, None),
        ("rho=0.1", 43.0, 44.0),
    ]
    assert [r[6] for r in tables.variants(found).rows] == ["−1.00", "−1.00", "–", "−1.00"]


def test_another_model_is_compared_by_itself():
    """Beside the paper's model, and where the paper has none beside the most frequent one; never with the paper."""
    other = {"model": "resnet18_gn", "lr": 0.05}
    rows = [*pair(40.0, 52.0, model="cifar_cnn"), *pair(50.5, 55.4, **other), row(54.0, man_logits=False, **other)]
    papers, residual = comparisons(series(rows))
    assert (papers.title, papers.in_paper, len(papers.cells)) == ("CIFAR-100", True, 2)
    assert not papers.variants()
    assert (residual.title, residual.name) == ("CIFAR-100 with resnet18_gn", "cifar100-resnet18-gn")
    assert [(c.series.method, c.series.mean, c.target) for c in residual.cells] == [
        ("FedAvg", 50.5, None), ("FedAvg+MAN", 55.4, None),
    ]  # fmt: skip
    assert [(changes, s.mean) for changes, s, _ in residual.variants()] == [("man_logits=false", 54.0)]
    assert not residual.in_paper
    assert tables.gains(residual).rows == [["FedAvg", "+4.90"]]
    assert {r[4] for r in tables.all_runs(residual.all_series).rows} == {
        "model=resnet18_gn", "model=resnet18_gn, man_logits=false",
    }  # fmt: skip
    models = ["mlp", "mlp", "small_cnn"]
    own = [row(90.0, dataset="digits", zeta=0, model=name, seed=seed) for seed, name in enumerate(models)]
    found = [(c.title, len(c.all_series[0].runs)) for c in comparisons(series(own))]
    assert found == [("Digits", 2), ("Digits with small_cnn", 1)]


def test_attacks_and_rules_have_a_table_of_their_own():
    half = {"rounds": 250, "participation": 0.2}
    rows = [
        *pair(40.0, 52.0),
        *pair(38.0, 49.0, **half),
        *pair(36.0, 48.0, aggregation="krum", **half),
        *pair(20.0, math.nan, attack="collusion", **half),
        row(30.0, zeta=0, attack="sign-flip", aggregation="krum", **half),
        row(31.0, zeta=0, attack="sign-flip", attack_scale=4.0, aggregation="krum", **half),
        row(39.0, zeta=0, cohort="fixed"),
    ]
    found = compare(rows)
    table = tables.poisoning(found)
    assert table.header == ["attack", "mean", "krum"]
    assert table.rows == [
        ["none", "38.00 / 49.00", "36.00 / 48.00"],
        ["sign-flip, attack_scale=4.0", "–", "31.00 / –"],
        ["sign-flip, attack_scale=8.0", "–", "30.00 / –"],
        ["collusion", "20.00 / diverged", "–"],
    ]
    assert table.note == "dir0.3; FedAvg; participation=0.2, rounds=250. Each plain / MAN; ζ = 0.15."
    assert [changes for changes, _, _ in found.variants()] == ["cohort=fixed"]
    assert not tables.poisoning(compare(rows[:2])).rows


def test_attacks_in_several_settings_are_told_apart():
    rows = [row(40.0 - i, zeta=0, attack=attack, algorithm=a) for i, a in enumerate(("fedavg", "fedsam"))
            for attack in ("none", "scaled")]  # fmt: skip
    table = tables.poisoning(compare(rows))
    assert table.header == ["algorithm", "attack", "mean"]
    assert [line[:2] for line in table.rows] == [[m, a] for m in ("FedAvg", "FedSAM") for a in ("none", "scaled")]
    assert table.rows[0][2] == "40.00"


def test_a_data_set_the_paper_does_not_have():
    found = compare([r for s in (0, 1) for r in pair(90.0 + s, 94.0 + s, dataset="digits", seed=s)])
    assert {c.mark for c in found.cells} == {NONE}
    assert found.zetas == {"man": 0.05}
    assert tables.headline(found).rows == [["FedAvg", "90.50 ± 0.71"], ["FedAvg+MAN", "94.50 ± 0.71"]]
    assert found.target is None
    assert {what: value for value, what in narrative.tiles([found])}["points, the median gain"] == "+4.00"


def test_rounds_to_another_target_are_not_beside_the_papers():
    found = compare(pair(40.0, 52.0, target=30, rounds_to_target=100))
    assert [(c.rounds_mark, c.rounds_ratio) for c in found.cells] == [(NONE, None)] * 2
    assert tables.rounds(found).rows == [["FedAvg", "100", "–", "–"], ["FedAvg+MAN", "100", "–", "–"]]
    assert tables.accuracy(found).rows[0][-1] == "–"
    assert not any(sentence.startswith("Rounds") for sentence in narrative.dataset(found))


def test_runs_stopped_early_did_not_need_more_than_all_rounds():
    rows = [row(40.0, zeta=0) | {"stopped": "plateau", "round": 20}]
    (cell,) = compare(rows).cells
    assert (tables.rounds_text(cell.series), cell.rounds_mark) == ("20+", NONE)


def test_rounds_to_different_targets_are_not_put_together():
    found = compare([*pair(40.0, 52.0, rounds_to_target=100), row(52.0, seed=1, target=30, rounds_to_target=20)])
    assert [tables.rounds_text(cell.series) for cell in found.cells] == ["100", "–"]
    assert found.target == 50.0
    rows = pair(40.0, 52.0, rounds_to_target=100)
    rows[0]["config"]["target"] = 30.0
    assert compare(rows).target is None
    assert not any(sentence.startswith("Rounds") for sentence in narrative.dataset(compare(rows)))
    del rows[0]["config"]["target"]
    assert any(sentence.startswith("Rounds to 50 %") for sentence in narrative.dataset(compare(rows)))
