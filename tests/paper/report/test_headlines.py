"""Runs of other tasks, penalties and algorithms than the paper's: directions, units, names, colours, clients."""

import csv
import io
import json
import math
import re

import pytest

from fedman.paper.report import command, curves, figure, narrative, tables
from fedman.paper.report.compare import comparisons
from fedman.paper.report.series import series
from tests.paper.report.report_rows import compare, own_row, pair, row, write

OWN = "no_such_package.fedfoo:FedFoo"  # a report imports nothing that a file names


def page_of(rows, folder):
    write(folder / "a.jsonl", rows)
    command(folder / "a.jsonl", folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def without_code(page):
    return re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Regression with three penalties and a user's own algorithm; clients with test samples of their own."""
    rows = [own_row(0.5, zeta=z, target=0.6, rounds_to_target=5, each=[0.4, 0.6]) for z in (0, 0.1, 0.2, 0.3)]
    rows += [own_row(0.4, zeta=0.1, penalty=penalty) for penalty in ("feddecorr", "no_such_package:Spread")]
    rows += [own_row(0.4, algorithm=OWN, each=[0.3, 0.5])]
    return page_of(rows, tmp_path_factory.mktemp("own"))


def test_axes_and_titles_name_the_figure(page):
    assert "accuracy" not in page
    assert page.count("test rmse, lower is better</text>") == 4, "overview, convergence, clients, sensitivity"
    assert "Dotted: the target of 0.6." in page
    assert "rounds to 0.6<" in page
    assert "%" not in without_code(page)
    assert "mathdefault" not in page


def test_buttons_and_colours_of_own_parts(page):
    assert all(f"with {name}</button>" in page for name in ("MAN", "FedDecorr", "Spread"))
    assert "FedFoo</th>" in page
    assert "fedfoo:FedFoo" not in page
    both = "light-dark({}, {})".format(*figure.tones(OWN))
    assert f"--no-such-package-fedfoo-FedFoo: {both};" in page
    assert "var(--no-such-package-fedfoo-FedFoo, var(--muted))" in page, "a dot beside its name"
    assert f"stroke: {both}" in page, "its curves"
    assert 'data-series="no-such-package-fedfoo-FedFoo plain"' in page
    assert 'data-toggle="no-such-package-fedfoo-FedFoo"' in page


def test_clients_on_the_page(page):
    assert 'id="npz-mine.npz-iid-clients"' in page
    assert 'role="img" aria-label="mine.npz, iid: rmse of each client"' in page
    assert 'id="npz-mine.npz-clients"' in page


def test_lower_is_better():
    rows = [own_row(0.5, seed=0), own_row(0.52, seed=1), own_row(0.4, zeta=0.1, seed=0), own_row(0.6, algorithm=OWN)]
    found = compare(rows)
    assert found.headline.lower_is_better
    assert [pair.gain for pair in found.pairs] == [pytest.approx(0.1)], "over the seed that both have"
    table = tables.gains(found)
    assert (table.title, table.rows) == ("mine.npz: what MAN gains in rmse", [["FedAvg", "+0.1000"]])
    assert table.note == (
        "ζ = 0.1; over the seeds that both have: seed 0. Positive is better: so much lower is the rmse."
    )
    assert tables.headline(found).title == "mine.npz, rmse"
    assert tables.headline(found).rows[:2] == [["FedAvg", "0.5100 ± 0.0141"], ["FedAvg+MAN", "0.4000"]]
    tiles = {what: value for value, what in narrative.tiles([found])}
    assert tiles == {
        "runs": "4",
        "pairs in which MAN gains": "1 of 1",
        "the median gain in rmse": "+0.1000",
        "the best rmse: FedAvg+MAN": "0.4000",
    }
    assert narrative.dataset(found)[1] == ("MAN gains +0.1000 in the rmse of FedAvg, iid; positive is better, lower.")


def test_higher_is_better_and_not_in_percent():
    rows = [own_row(v, headline="r2", lower=False, zeta=z, algorithm=a)
            for a, plain, man in (("fedavg", -0.5, 0.25), ("feddyn", 0.5, 0.4))
            for z, v in ((0, plain), (0.1, man))]  # fmt: skip
    found = compare(rows)
    assert narrative.dataset(found)[1] == (
        "MAN raises the r2 in 1 of 2 pairs; the change is −0.1000 (FedDyn, iid) to +0.7500 (FedAvg, iid)."
    )
    assert ("0.5000", "the best r2: FedDyn") in narrative.tiles([found])


def test_the_steep_beginning_of_a_falling_curve_is_cut_off():
    found = compare([own_row(0.5, rounds=100)])
    (picture,) = curves.convergence(found)
    low, high = json.loads(picture.hover)["ylim"]
    assert low < 0.5 < high < 1.5, "the curve falls from 1.5 at round 1 to 0.5 at round 10"
    assert high > 0.5 * 1.5


def test_penalties_are_named_by_what_they_are(tmp_path):
    """Each has its own usual ζ; a run without weight is plain, whatever its penalty is called."""
    decorr, own = {"penalty": "feddecorr"}, {"penalty": "no_such_package:Spread"}
    rows = [
        own_row(0.5), own_row(0.5, **decorr), own_row(0.4, zeta=0.1), own_row(0.3, zeta=0.2, **decorr),
        own_row(0.6, zeta=0.3, **own),
    ]  # fmt: skip
    found = compare(rows)
    methods = ["FedAvg", "FedAvg+MAN", "FedAvg+FedDecorr", "FedAvg+Spread"]
    assert [cell.series.method for cell in found.cells] == methods
    assert not found.others
    assert found.zeta_text == "MAN ζ = 0.1, FedDecorr ζ = 0.2, Spread ζ = 0.3"
    assert tables.gains(found).rows == [
        ["FedAvg+MAN", "+0.1000"], ["FedAvg+FedDecorr", "+0.2000"], ["FedAvg+Spread", "−0.1000"],
    ]  # fmt: skip
    alone = page_of([own_row(0.5), own_row(0.3, zeta=0.2, **decorr)], tmp_path)
    assert "MAN" not in without_code(alone)
    assert "From plain to FedDecorr" in alone
    assert "Clients</h3>" not in alone
    assert "Federated learning with and without FedDecorr." in alone


def test_another_penalty_is_not_the_papers():
    """The paper's figures are MAN's; so is its ζ."""
    rows = [*pair(40.0, 52.0), row(50.0, zeta=0.4, penalty="feddecorr")]
    found = compare(rows)
    assert [(c.series.method, c.target and c.target.accuracy) for c in found.cells] == [
        ("FedAvg", 40.9), ("FedAvg+MAN", 52.0), ("FedAvg+FedDecorr", None),
    ]  # fmt: skip


def test_algorithms_from_outside_have_a_title_and_a_colour():
    rows = [own_row(0.5), own_row(0.4, algorithm=OWN), own_row(0.45, algorithm="other_package:FedFoo")]
    assert tables.headline(compare(rows)).rows == [["FedAvg", "0.5000"], ["FedFoo", "0.4000"], ["FedFoo", "0.4500"]]
    light, _ = figure.tones(OWN)
    assert light == "#671e67"
    assert len({light, figure.MUTED, *(figure.tones(a)[0] for a in ("fedavg", "other_package:FedFoo"))}) == 4


def test_two_headlines_on_one_data_set_are_two_comparisons():
    rows = [own_row(0.5), own_row(0.9, headline="r2", lower=False, task="mine:Fit"), own_row(math.nan, task="mine:Fit")]
    found = comparisons(series(rows))
    assert [(data.title, data.name) for data in found] == [
        ("mine.npz (r2)", "npz-mine.npz-by-r2"), ("mine.npz (rmse)", "npz-mine.npz-by-rmse"),
    ]  # fmt: skip
    assert [len(data.all_series) for data in found] == [1, 1], "the run that diverged is one of its task's"
    every = tables.all_runs([s for data in found for s in data.all_series])
    assert "headline" in every.header
    assert {r[6] for r in every.rows} == {"r2 0.9000", "rmse 0.5000"}


def test_keys_that_a_configuration_leaves_out_have_their_defaults():
    """A run with another optimiser is a variant, although the others do not name theirs."""
    found = compare([own_row(0.5, seed=s) for s in range(3)] + [own_row(0.4, optimizer="adam")])
    assert [(s.variant, len(s.runs)) for s in found.all_series] == [("", 3), ("optimizer=adam", 1)]


def test_text_shows_accuracy_and_perplexity(tmp_path):
    rows = [own_row(30.0 + s, headline="accuracy", lower=False, more={"perplexity": 8.0 + s}, seed=s,
                    task="language-model") for s in (0, 1)]  # fmt: skip
    for made in rows:
        del made["headline"], made["lower_is_better"]
    found = compare(rows)
    (line,) = csv.DictReader(io.StringIO(tables.accuracy(found).csv()))
    assert (line["accuracy"], line["perplexity"]) == ("30.50", "8.500 ± 0.707")
    page = page_of(rows, tmp_path)
    assert '<th scope="col">accuracy %</th><th scope="col">perplexity</th>' in page
    assert '<td class="quiet">8.500 ± 0.707</td>' in page


@pytest.mark.parametrize(("lower", "sorted_scores"), [(False, [0.2, 0.5, 0.8]), (True, [0.8, 0.5, 0.2])])
def test_clients_are_sorted_from_the_worst(lower, sorted_scores):
    """Over seeds: the mean of the worst ones, of the second worst ones, ..."""
    each = [[0.7, 0.1, 0.4], [0.3, 0.9, 0.6]]
    rows = [own_row(0.5, headline="score", lower=lower, each=e, seed=s) for s, e in enumerate(each)]
    found = compare([*rows, own_row(0.5, headline="score", lower=lower, zeta=0.1)])
    (picture,) = curves.clients(found)
    (line,) = json.loads(picture.hover)["lines"]
    assert (line["label"], line["x"]) == ("FedAvg", [1, 2, 3])
    assert line["y"] == pytest.approx(sorted_scores)
    assert "score of each client" in picture.title
    table = tables.clients(found)
    assert table.header == ["partition", "method", "mean", "worst tenth", "spread"]
    worst = "0.8000 ± 0.1414" if lower else "0.2000 ± 0.1414"
    assert table.rows == [["iid", "FedAvg", "0.5000 ± 0.1414", worst, "0.2449 ± 0.0000"]]


def test_clients_of_another_weight_are_told_apart():
    found = compare([own_row(0.5, zeta=z, seed=s, each=[0.4, 0.6]) for z, s in ((0, 0), (0.1, 0), (0.1, 1), (0.3, 0))])
    table = tables.clients(found)
    assert [line[1:3] for line in table.rows] == [["FedAvg", ""], ["FedAvg+MAN", "ζ=0.1"], ["FedAvg+MAN", "ζ=0.3"]]


def test_runs_that_diverged_alone_have_the_headline_of_their_task():
    (data,) = comparisons(series([own_row(math.nan)]))
    assert (data.headline.name, data.headline.lower_is_better) == ("rmse", True)


def test_the_median_gain_of_several_data_sets():
    """Of percentages; the first data set has no pair."""
    rows = [row(90.0, dataset="digits", zeta=0), *pair(40.0, 52.0)]
    found = comparisons(series(rows))
    assert ("+12.00", "points, the median gain") in narrative.tiles(found[::-1])
    other = [own_row(v, zeta=z, dataset=d) for d in "ab" for z, v in ((0, 0.5), (0.1, 0.4))]
    tiles = narrative.tiles(comparisons(series(other)))
    assert ("2 of 2", "pairs in which MAN gains") in tiles
    assert not any("median" in what for _, what in tiles), "their units may differ"


def test_many_clients_are_drawn_by_a_hundred_points():
    values = [float(i) for i in range(1000)]
    (picture,) = curves.clients(compare([own_row(0.5, headline="score", lower=False, each=values)]))
    (line,) = json.loads(picture.hover)["lines"]
    assert len(line["x"]) == 100
    assert (line["x"][0], line["x"][-1]) == (1, 1000)


def test_what_is_not_finite_counts_as_diverged(tmp_path):
    rows = [own_row(0.5), own_row(1.0, zeta=0.1, each=[0.5, math.inf]), own_row(0.4, zeta=0.1, seed=1)]
    rows[1]["rmse"]["all"] = math.inf
    rows[1]["curve"]["all"] = [3.0, math.inf, math.nan]
    rows[2]["curve"]["all"] = [1e300, 1e200, 0.4]
    page = page_of(rows, tmp_path)
    assert "Diverged: FedAvg+MAN, " in page
    assert not re.search(r"\b(NaN|Infinity|inf|nan)\b", page)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"headline": "mae"}, "line 1: mae is missing"),
        ({"headline": "config"}, "line 1: config: all is missing"),
        ({"rmse": {"all": "low"}}, "line 1: rmse: all should be a valid number, not 'low'"),
        ({"rmse": 3.0}, "line 1: rmse: should be a JSON object, not 3.0"),
        ({"lower_is_better": "yes"}, "line 1: lower_is_better should be a valid boolean, not 'yes'"),
        ({"clients": {"mean": 0.5}}, "line 1: clients.worst_tenth is missing"),
        ({"clients": {"mean": 1.0, "worst_tenth": 1.0, "spread": 0.0, "each": ["x"]}}, "line 1: clients.each.0 should"),
    ],
)
def test_rows_that_lack_their_headline(tmp_path, change, message):
    with pytest.raises(Exception, match=re.escape(message)):
        page_of([own_row(0.5) | change], tmp_path)
    assert not (tmp_path / "page.html").exists()


def test_names_from_files_are_text(tmp_path):
    bad = "<b>\"'&;}</style><script>alert(1)</script>"
    rows = [
        own_row(0.5, algorithm=f"a:{bad}", zeta=z, penalty=f"b:{bad}", each=[0.1, 0.2], headline=bad) for z in (0, 1)
    ]
    rows += [own_row(0.5, headline=bad, more={f"more {bad}": 1.0})]
    page = page_of(rows, tmp_path)
    assert "<b>" not in page
    assert "<script>alert" not in page
    assert ";}</style>" not in page
