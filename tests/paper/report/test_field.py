"""The field's section: tuned beside default, ranked; what was not measured is empty and nothing is claimed of it."""

import json

import pytest

from fedman.config import resolve
from fedman.paper.presets import PRESETS, SWEEPS, TUNED, ZETA
from fedman.paper.report import command, curves, field, field_narrative, field_sharpness, field_tables, page
from fedman.paper.report.sources import FieldSources, find
from fedman.runs import tune
from fedman.runs.grid import cells
from tests.cli.command_line import main_ok
from tests.paper.report.report_rows import compare, eigenvalues, estimate, pair, row, write

MEANS = {"fedavg": (40.0, 53.0), "feddyn": (50.0, 55.0), "fedacg": (52.0, 51.0)}
CHOSEN = {"fedavg": {"lr": 0.1}, "feddyn": {"alpha": 0.1, "lr": 0.03}, "fedacg": {"server_momentum": 0.7, "lr": 0.1}}


def tuning(algorithm):
    """A `tune.json` in which the same setting is best without and with MAN."""
    settings = []
    for cell in cells({"validation": 0.1, "algorithm": algorithm}, SWEEPS["field-tune"]):
        varied = {key: getattr(cell.config, key) for key in cell.varied}
        own = {k: v for k, v in varied.items() if k not in ("algorithm", "zeta")}
        best = own == CHOSEN[algorithm]
        settings.append(
            {"varied": varied, "config": cell.config.flat(), "seeds": [0], "chosen": best,
             "scores": {"500": 45.0 if best else 44.0}, "seconds": 8.0}
        )  # fmt: skip
    return {"format": 1, "headline": "accuracy", "lower_is_better": False, "each": ["algorithm", "zeta"],
            "rungs": [500], "settings": settings}  # fmt: skip


def measured(r, **values):
    """The record of `fedman flatness` of a run."""
    run = {key: r["config"][key] for key in ("dataset", "partition", "clients", "model", "algorithm", "zeta", "rounds")}
    config = {k: v for k, v in r["config"].items() if k not in ("checkpoint_seconds", "keep_state", "tensorboard")}
    config["precision"] = r["precision"]  # that which was used
    sharp = {name: {"value": values["top"] / 10, "rho": 1.0} for name in ("average", "worst_2", "worst_inf", "m_2")}
    return {
        "format": 1,
        "run": {**run, "seed": r["config"]["seed"], "method": "as named", "config": config},
        "models": {"all": {
            "top": eigenvalues([values["top"]], samples=values.get("samples", 10000)),
            "trace": estimate(values["trace"], samples=10000),
            "gauss_newton": {"top": values["top"], "converged": True, "trace": estimate(1.0)},
            "sharpness": {"m": 128, "measures": sharp},
        }},
    }  # fmt: skip


def tuned_rows(algorithm, seeds=(0, 1), partition="dir0.3"):
    plain, man = MEANS[algorithm]
    return [
        r for s in seeds for r in pair(plain + s, man + s, algorithm, seed=s, partition=partition, **CHOSEN[algorithm])
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Three algorithms: FedAvg's choice is its default, FedACG's default was not run, one partition is missing."""
    place = tmp_path_factory.mktemp("field") / "results"
    (place / "field").mkdir(parents=True)
    write(place / "cifar100.jsonl", [*pair(40.0, 53.0), *pair(47.0, 54.0, "feddyn"), row(41.0, zeta=0, seed=1)])
    mine = [r for a in CHOSEN for r in tuned_rows(a)] + tuned_rows("feddyn", (0,), "iid")
    mine += [row(49.0, algorithm="fedavg", penalty="feddecorr", zeta=0.1), row(44.0, zeta=0, weight_decay=0.002)]
    mine += [row(99.0, algorithm="fedavg", zeta=0, validation=0.1)]
    write(place / "field" / "runs.jsonl", mine)
    for algorithm in CHOSEN:
        (place / "field" / f"{algorithm}-tune.json").write_text(json.dumps(tuning(algorithm)))
    firsts = [r for r in mine if r["config"]["seed"] == 0 and "accuracy" in r and r["config"]["partition"] == "dir0.3"]
    for number, r in enumerate(firsts[:6]):
        record = measured(r, top=100.0 - r["accuracy"]["all"], trace=float(number + 1))
        (place / "field" / f"{number}-flatness.json").write_text(json.dumps(record))
    return place


@pytest.fixture(scope="module")
def data(results):
    found = find(results)
    return field.field(found.field, found.rows)


def told(data):
    return " ".join(text for _, sentences in field_narrative.briefs(data) for text in sentences)


def cell(table, method, column):
    (line,) = [line for line in table.rows if method in line[:2]]
    return line[table.header.index(column)]


def test_every_grid_has_six_settings_with_the_defaults_among_them():
    grid = cells({"validation": 0.1}, SWEEPS["field-tune"])
    plan = tune.plan(grid, ["algorithm", "zeta"], [])
    assert len(plan.groups) == 36
    assert {len(group) for group in plan.groups} == {6}
    apart = ("eval_every", "eval_others_every", "validation")
    for group in plan.groups:
        first = group[0].cells[0].config
        default = resolve({"algorithm": first.algorithm, "zeta": first.zeta}, PRESETS["cifar100-dir0.3"]).flat()
        tried = [setting.cells[0].config.flat() for setting in group]
        assert {k: v for k, v in default.items() if k not in apart} in [
            {k: v for k, v in each.items() if k not in apart} for each in tried
        ]
    assert {cell.config.zeta for cell in grid} == {0.0, ZETA["cifar100"]}
    assert {cell.config.partition for cell in grid} == {"dir0.3"}


def test_the_fields_sweeps():
    whole = cells({}, SWEEPS["field"])
    seeds = {p: {c.config.seed for c in whole if c.config.partition == p} for p in ("dir0.3", "dir0.6", "iid")}
    assert seeds == {"dir0.3": {0, 1, 2}, "dir0.6": {0, 1, 2}, "iid": {0}}
    assert len(whole) == 18 * 2 * 7
    kinds = {(c.config.penalty, c.config.zeta, c.config.weight_decay) for c in cells({}, SWEEPS["field-penalties"])}
    assert kinds == {
        ("man-hidden", 0.15, 0.001), ("man-logits", 0.15, 0.001), ("activation-l1", 0.05, 0.001),
        ("activation-l1", 0.15, 0.001), ("feddecorr", 0.1, 0.001), ("feddecorr", 4.8, 0.001), ("man", 0.0, 0.002),
        ("man", 0.0, 0.004), ("man", 0.0, 0.008),
    }  # fmt: skip
    (batch_size,) = {c.config.batch_size for c in cells({}, SWEEPS["field-penalties"])}
    assert 0.1 * (batch_size - 1) ** 2 / batch_size == pytest.approx(4.8, abs=0.01)  # FedDecorr's 0.1 in its own code


def test_methods_are_ranked_and_what_is_missing_is_empty(data):
    table = field_tables.ranking(data)
    assert len(table.rows) == 36
    order = [line[1] for line in table.rows[:6]]
    assert order == ["FedDyn+MAN", "FedAvg+MAN", "FedACG", "FedACG+MAN", "FedDyn", "FedAvg"]
    assert [line[0] for line in table.rows[:7]] == ["1", "2", "3", "4", "5", "6", "–"]
    assert {tuple(line[2:]) for line in table.rows[6:]} == {("–",) * 8}
    assert cell(table, "FedDyn+MAN", "tuned") == "55.50 ± 0.71"
    assert cell(table, "FedDyn+MAN", "default") == "54.00"
    assert cell(table, "FedDyn+MAN", "tuning adds") == "+1.00"  # over the seed that both have
    assert "Tuning adds: over the seeds that both have, seeds 0, 1 or some of them." in table.note
    assert "mean cross-entropy on 10 000 training samples, at the tuned models, seed 0." in table.note
    assert cell(table, "FedDyn+MAN", "chosen") == "alpha=0.1 lr=0.03"
    assert cell(table, "FedAvg", "default") == cell(table, "FedAvg", "tuned") == "40.50 ± 0.71"  # the default is chosen
    assert cell(table, "FedACG", "default") == "–"
    assert cell(table, "FedACG", "s") == "11.0"
    assert cell(table, "FedACG", "rounds to 50 %") == "500+"
    assert float(cell(table, "FedACG", "λ_max")) == 48.0
    assert ", 2 seeds, ζ" in table.note  # of this partition alone
    parts = field_tables.partitions(data)
    assert cell(parts, "FedDyn", "iid, tuned") == "50.00"
    assert cell(parts, "FedDyn", "Dirichlet 0.6, tuned") == "–"


def test_what_man_adds(data):
    table = field_tables.gains(data)
    assert len(table.rows) == 18
    assert cell(table, "FedDyn", "Dirichlet 0.3, tuned") == "+5.00"
    assert cell(table, "FedDyn", "Dirichlet 0.3, default") == "+7.00"
    assert cell(table, "FedACG", "Dirichlet 0.3, tuned") == "−1.00"
    assert cell(table, "FedGloSS", "Dirichlet 0.3, tuned") == "–"


def test_penalties_beside_man(data):
    table = field_tables.penalties(data)
    assert table.header == ["penalty", "ζ", "FedAvg", "against none"]
    assert [line[:2] for line in table.rows] == [
        ["none", "–"], ["MAN", "0.15"], ["FedDecorr", "0.1"], ["none, weight_decay=0.002", "–"]
    ]  # fmt: skip
    assert [line[3] for line in table.rows] == ["–", "+13.00", "+9.00", "+4.00"]  # over seed 0


def test_rank_correlations(data):
    table = field_sharpness.correlations(data)
    assert cell(table, "λ_max of the Hessian", "all") == "−1.00"
    assert table.rows[0][2] == "6"
    assert table.rows[0][4] == table.rows[0][6] == "3"
    assert cell(table, "m-sharpness, p = ∞", "all") == "–"  # not measured
    assert [p.name for p in field_sharpness.scatter(data)] == ["field-hessian", "field-trace", "field-gauss-newton"]


def test_sentences_say_no_more_than_was_measured(data):
    text = told(data)
    assert "Of 36 methods, tuned 6 on Dirichlet 0.3, 0 on Dirichlet 0.6, 2 on iid; with the defaults 4 " in text
    assert "the best is FedDyn+MAN with 55.50 ± 0.71 %; the best without MAN FedACG with 52.50 ± 0.71 %." in text
    assert (
        "Tuned, MAN raises the accuracy of 2 of 3 algorithms on Dirichlet 0.3 (seeds 0, 1), in points −1.00 (FedACG) "
        "to +13.00 (FedAvg), +5.00 in the median; 1 of 1 on iid (seed 0), +5.00 (FedDyn). It does not help FedACG "
        "(−1.00) on Dirichlet 0.3."
    ) in text
    assert (
        "With the defaults, MAN raises the accuracy of 2 of 2 algorithms on Dirichlet 0.3 (seeds 0, 1 or some of"
        in text
    )
    assert text.count("It does not help") == 1
    assert (
        "On Dirichlet 0.3 tuning adds +0.00 (FedAvg) to +3.00 (FedDyn), +0.50 in the median (4 methods, seeds" in text
    )
    assert (
        "Over FedAvg, tuned alike on Dirichlet 0.3 (seeds 0, 1), the other algorithms gain +10.00 (FedDyn) to +12.00 "
        "(FedACG); in the median of 1 +10.00, with the defaults +7.00. Over FedAvg+MAN, tuned alike on Dirichlet 0.3 "
        "(seeds 0, 1), the other algorithms with MAN gain −2.00 (FedACG) to +2.00 (FedDyn); in the median of 1 +2.00, "
        "with the defaults +1.00. FedAvg+MAN is ahead of 2 of the 2 others without MAN."
    ) in text
    assert (
        "On FedAvg with its defaults MAN adds +13.00, other penalties and weight decays +4.00 (weight_decay=0.002) "
        "to +9.00 (FedDecorr, ζ = 0.1); 0 of 2 add more than MAN."
    ) in text
    assert "Rank correlation of the measures of sharpness with test accuracy: −1.00 (λ_max of the Hessian)" in text
    assert "Diverged" not in text
    only = field.field(FieldSources(tunings=[tuning("fedavg")]), [])
    assert told(only) == (
        "Of 36 methods, tuned 0 on Dirichlet 0.3, 0 on Dirichlet 0.6, 0 on iid; with the defaults 0 on "
        "Dirichlet 0.3, 0 on Dirichlet 0.6, 0 on iid. Tuning took 12 runs, 6 for each of 2 methods."
    )
    assert field_narrative.answer(only) == field_narrative.answer(None) == ""
    assert {tuple(line[2:5]) for line in field_tables.ranking(only).rows} == {("–",) * 3}
    assert field.field(FieldSources(), []) is None


def test_what_diverges_with_man_is_told_and_uncommitted_code_is_marked(results):
    found = find(results)
    rows = [r | {"source": {}} if r["config"]["algorithm"] == "feddyn" else r for r in found.field.rows]
    lost = [i for i, r in enumerate(rows) if r["config"]["algorithm"] == "fedacg" and r["config"]["zeta"]]
    rows[lost[0]] = diverged(rows[lost[0]])
    data = field.field(FieldSources(rows, found.field.flatness, found.field.tunings), found.rows)
    text = told(data)
    assert "Diverged with one seed or more: FedACG+MAN (Dirichlet 0.3, tuned)." in text
    assert "MAN raises the accuracy of 2 of 3 algorithms on Dirichlet 0.3 (seeds 0, 1), in points +5.00 (" in text
    assert "It does not help FedACG (diverges) on Dirichlet 0.3." in text
    ranking = field_tables.ranking(data)
    assert cell(ranking, "FedACG+MAN", "rank") == "–"
    assert cell(ranking, "FedACG+MAN", "tuned") == "diverged"
    assert [cell(ranking, "FedACG+MAN", column) for column in ("rounds to 50 %", "λ_max", "trace")] == ["–"] * 3
    assert cell(field_tables.gains(data), "FedACG", "Dirichlet 0.3, tuned") == "diverges"
    assert cell(ranking, "FedDyn+MAN", "tuned") == "55.50 ± 0.71†"
    assert cell(field_tables.gains(data), "FedDyn", "Dirichlet 0.3, tuned") == "+5.00†"
    assert cell(field_tables.partitions(data), "FedDyn", "iid, tuned") == "50.00†"
    assert all(
        "† with a run" in table.note for table in (ranking, field_tables.gains(data), field_tables.partitions(data))
    )


def diverged(r):
    """The row of a run with this configuration that diverged."""
    own = {key: r[key] for key in ("config", "version", "source", "curve")}
    return own | {"diverged": "round 3: not finite", "round": 3}


def test_a_method_all_of_whose_tuning_diverged_is_lost(results):
    """It has no setting to be run with, which is not to its advantage."""
    found = find(results)
    tunings = [tuning(a) for a in CHOSEN]
    for tried in (each for t in tunings for each in t["settings"]):
        if tried["config"]["algorithm"] == "fedacg" and tried["config"]["zeta"]:
            tried |= {"scores": {"500": None}, "chosen": False}
    data = field.field(FieldSources(found.field.rows, [], tunings), found.rows)
    text = told(data)
    assert "Diverged with one seed or more: FedACG+MAN (Dirichlet 0.3, with every setting that was tried)." in text
    assert "Tuned, MAN raises the accuracy of 2 of 3 algorithms on Dirichlet 0.3" in text
    assert "It does not help FedACG (diverges in tuning) on Dirichlet 0.3." in text
    assert "gain +2.00 (FedDyn); in the median of 1 +2.00, with the defaults +1.00; diverged: FedACG." in text
    assert cell(field_tables.ranking(data), "FedACG+MAN", "tuned") == "diverged"
    assert cell(field_tables.partitions(data), "FedACG+MAN", "Dirichlet 0.3, tuned") == "diverged"
    assert cell(field_tables.gains(data), "FedACG", "Dirichlet 0.3, tuned") == "diverges"
    assert field_narrative.answer(data).startswith("**After the paper**: 3 algorithms on CIFAR-100")


def test_the_answer_counts_what_was_compared(results):
    """FedACG was run without MAN alone, and FedDyn's last setting has not been tried."""
    found = find(results)
    rows = [r for r in found.field.rows if (r["config"]["algorithm"], r["config"]["zeta"] > 0) != ("fedacg", True)]
    tunings = [tuning(a) for a in CHOSEN]
    last = tunings[list(CHOSEN).index("feddyn")]["settings"][-1]
    last["scores"] = {}
    data = field.field(FieldSources(rows, [], tunings), found.rows)
    answer = field_narrative.answer(data)
    assert answer.startswith(
        "**After the paper**: 2 algorithms on CIFAR-100, tuned alike without and with MAN, 5 to 6 runs each ("
    )
    assert "MAN raises the accuracy of 2 of 2 algorithms on Dirichlet 0.3 (seeds 0, 1), in points" in answer
    assert "Tuning took 35 runs, 5 to 6 for each of 6 methods." in told(data)


def test_penalties_that_diverge_count(results):
    found = find(results)
    rows = [diverged(r) if r["config"].get("penalty") == "feddecorr" else r for r in found.field.rows]
    text = told(field.field(FieldSources(rows, [], found.field.tunings), found.rows))
    assert (
        "On FedAvg with its defaults MAN adds +13.00, other penalties and weight decays +4.00 (weight_decay=0.002); 0 "
        "of 2 add more than MAN; diverged: FedDecorr, ζ = 0.1."
    ) in text
    table = field_tables.penalties(field.field(FieldSources(rows, [], found.field.tunings), found.rows))
    assert [line[3] for line in table.rows] == ["–", "+13.00", "diverges", "+4.00"]
    assert "over the seeds that both have, seeds 0, 1 or some of them." in table.note
    rows = [diverged(r) if r["config"]["algorithm"] == "fedavg" and r["config"]["zeta"] == 0.15 else r for r in rows]
    assert (
        "On FedAvg with its defaults MAN diverges, other penalties and weight decays add +4.00 (weight_decay=0.002); 1 "
        "of 2 add more than MAN; diverged: FedDecorr, ζ = 0.1."
    ) in told(field.field(FieldSources(rows, [], found.field.tunings), found.rows))


def test_of_several_measurements_of_a_model_the_one_on_most_samples_is_shown(results):
    """As in the tables of the paper's Hessians; models that were not tuned are left out."""
    found = find(results)
    firsts = [r for r in found.field.rows if r["config"]["seed"] == 0 and r["config"]["algorithm"] == "fedacg"]
    records = [measured(r, top=top, trace=1.0, samples=n) for r in firsts for top, n in ((20.0, 50000), (21.0, 10000))]
    records += [measured(r, top=7.0, trace=1.0) for r in found.field.rows if r["config"].get("weight_decay") == 0.002]
    data = field.field(FieldSources(found.field.rows, records, found.field.tunings), found.rows)
    assert cell(field_tables.ranking(data), "FedACG", "λ_max") == "20.00"
    assert field_sharpness.correlations(data).rows[0][2] == "2"
    assert "Measured on 10 000 and 50 000 training samples." in field_sharpness.correlations(data).note
    assert field_sharpness.caption(data).startswith(
        "A dot for each tuned model, measured on 10 000 and 50 000 training samples;"
    )
    section = page._field(data)
    (group,) = [g for g in section.groups if g.title == "Flatness and accuracy"]
    assert (group.text, list(group.pictures)) == ("", [])  # of two models there is nothing to draw


def test_at_most_three_algorithms_share_a_panel():
    names = ("fedavg", "feddyn", "fedsam", "fedcm", "fedacg", "fedavgm", "fedadam", "fedgloss")
    found = compare([r for name in names for r in pair(40.0, 50.0, name)])
    drawn = [{line["series"].split()[0] for line in json.loads(p.hover)["lines"]} for p in curves.convergence(found)]
    assert drawn == [
        {"fedavg", "feddyn"}, {"fedsam"}, {"fedavgm", "fedadam", "fedcm"}, {"fedacg", "fedgloss"}
    ]  # fmt: skip


def test_equal_accuracies_share_a_rank(results):
    found = find(results)
    rows = [
        r | {"accuracy": {"all": 55.0 + r["config"]["seed"]}} if r["config"]["algorithm"] == "feddyn" else r
        for r in found.field.rows
    ]
    data = field.field(FieldSources(rows, [], found.field.tunings), found.rows)
    table = field_tables.ranking(data)
    assert [(line[0], line[1]) for line in table.rows[:3]] == [
        ("1", "FedDyn"),
        ("1", "FedDyn+MAN"),
        ("3", "FedAvg+MAN"),
    ]


def test_a_setting_that_was_not_chosen_is_not_shown_as_tuned(results):
    found = find(results)
    other = row(70.0, algorithm="feddyn", zeta=0, alpha=0.03, lr=0.03)
    data = field.field(FieldSources([*found.field.rows, other], [], found.field.tunings), found.rows)
    assert data.get(data.tuned, ("feddyn", "")).mean == 50.5
    assert data.get(data.default, ("feddyn", "")).mean == 47.0


def test_the_page_shows_the_field_apart(results, tmp_path):
    said = command(results, tmp_path / "report.html")
    assert "21 runs" in said
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<section id="field">' in page
    tables = tmp_path / "report_files/tables"
    assert "FedACG" not in (tables / "cifar100-headline.md").read_text(encoding="utf-8")
    assert (tables / "field-summary.md").read_text(encoding="utf-8").startswith("**Measured.** Of 36 methods, tuned 6")
    answer = (tables / "field-answer.md").read_text(encoding="utf-8")
    assert answer.startswith(
        "**After the paper**: 3 algorithms on CIFAR-100, tuned alike without and with MAN, 6 runs each ("
    )
    assert answer.count("\n") == 1
    assert "Tuned, MAN raises the accuracy of 2 of 3 algorithms on Dirichlet 0.3" in answer
    assert "1 run was evaluated on samples held out" in (tables / "summary.md").read_text(encoding="utf-8")
    runs = (tables / "all-runs.md").read_text(encoding="utf-8")
    assert "| FedACG+MAN |" in runs
    assert len((tables / "field-tried.md").read_text(encoding="utf-8").splitlines()) == 4 + 36
    assert {p.stem for p in tables.glob("field-*.md")} == {
        f"field-{name}"
        for name in ("ranking", "gains", "partitions", "penalties", "sharpness", "tried", "summary", "answer")
    }  # fmt: skip


def test_only_what_is_in_a_folder_of_the_place_is_of_the_field(results, tmp_path):
    """A folder `field` above the place means nothing, and what lies in the folder of a run is of the run."""
    other = tmp_path / "field" / "runs"
    (other / "field" / "fedavg-seed0").mkdir(parents=True)
    write(other / "cifar100.jsonl", pair(40.0, 53.0))
    write(other / "field" / "tuned.jsonl", pair(41.0, 54.0, "fedprox"))
    record = json.dumps(measured(row(40.0, zeta=0), top=1.0, trace=1.0))
    for place in ("measured.flatness.json", "field/fedavg-seed0/flatness.json", "field/fedavg.flatness.json"):
        (other / place).write_text(record)
    found = find(other)
    assert (len(found.rows), len(found.flatness), len(found.field.rows), len(found.field.flatness)) == (2, 2, 2, 1)
    alone = find(results / "field")
    assert (len(alone.rows), len(alone.field.rows), len(alone.field.tunings)) == (0, 16, 3)


def test_a_repeated_run_of_the_papers_table_is_told(results):
    """The field's tables show the run whose model was measured."""
    place = results.parent / "again"
    (place / "field").mkdir(parents=True)
    write(place / "cifar100.jsonl", pair(40.0, 53.0))
    write(place / "field" / "tuned.jsonl", [row(40.5, zeta=0), row(53.0)])
    found = find(place)
    assert found.notes == ["1 run was played again for the field, with another result, which its tables show."]
    data = field.field(found.field, found.rows)
    assert data.get(data.default, ("fedavg", "")).mean == 40.5


@pytest.mark.slow
def test_from_tuning_to_the_page(tmp_path, monkeypatch):
    """The whole way on the embedded data: tune, play what was chosen and the defaults, measure, report."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(field, "DATASET", "digits")
    monkeypatch.setitem(ZETA, "digits", 0.05)
    small = ["--device", "cpu", "rounds=2", "epochs=1", "precision=fp32", "algorithm=fedavg,feddyn", "zeta=0,0.05"]
    grid = ["lr=0.03,0.1", "alpha=0.01"]
    main_ok(["tune", "--preset", "digits", *small, *grid, "--each", "algorithm,zeta", "--out", "tuned"])
    main_ok(["sweep", "--tuned", "tuned", "--device", "cpu", "seed=0,1", "--out", "runs"])
    main_ok(["sweep", "--preset", "digits", *small, "--out", "defaults"])
    folders = [str(p) for p in sorted((tmp_path / "runs").glob("*seed0"))]
    main_ok(["flatness", *folders, "--samples", "50", "--top", "1", "--trace", "--rtol", "0.3", "--device", "cpu"])
    main_ok(
        ["results", "runs", "defaults", "tuned", "--out", "results/field/runs.jsonl", "--flatness", "results/field"]
    )
    (tmp_path / "results/field/tune.json").write_bytes((tmp_path / "tuned/tune.json").read_bytes())
    found = find(tmp_path / "results")
    data = field.field(found.field, found.rows)
    assert len(data.tuned.cells) == len(data.default.cells) == 4
    assert all(len(c.series.runs) == 2 for c in data.tuned.cells)
    assert len(data.models) == 4
    assert set(TUNED) >= {c.series.algorithm for c in data.tuned.cells}
    ranking = field_tables.ranking(data)
    assert [line[0] for line in ranking.rows[:5]] == ["1", "2", "3", "4", "–"]
    assert all("–" not in (*line[2:6], *line[7:]) for line in ranking.rows[:4])  # there is no target
    assert cell(field_sharpness.correlations(data), "λ_max of the Hessian", "all") != "–"
    main_ok(["report", "results", "--out", "report.html"])
    assert '<section id="field"' in (tmp_path / "report.html").read_text(encoding="utf-8")
