"""Commands on tasks whose headline is not accuracy, and on clients with test samples of their own."""

import json

import numpy as np
import pytest

import fedman.data
from fedman.cli.output import print_result
from fedman.cli.progress import format_round
from fedman.config import resolve
from fedman.paper.report import command
from fedman.runs import sweep
from fedman.runs.folder import RunFolder
from fedman.runs.grid import cells
from fedman.runs.records import headline
from tests.cli.command_line import main_ok
from tests.runs.run_records import RECORD, SUMMARY

TINY = {"model": "mlp", "clients": "4", "participation": "1", "rounds": "2", "epochs": "1", "batch_size": "20"}


def arrays(targets):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5)).astype(np.float32)
    y = targets(x)
    return {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}


def test_a_sweep_of_a_regression(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.savez("mine.npz", **arrays(lambda x: x[:, :2].sum(1, keepdims=True)))
    keys = {**TINY, "dataset": "npz:mine.npz", "task": "regression", "partition": "iid", "target": "900"}
    main_ok(["sweep", *(f"{k}={v}" for k, v in keys.items()), "zeta=0,0.1", "seed=0,1", "--out", "grid"])
    said = capsys.readouterr()
    assert "loss" in said.err
    assert "rmse" in said.err
    assert "%" not in said.out + said.err
    table = (tmp_path / "grid" / "table.md").read_text(encoding="utf-8").splitlines()
    assert table[0] == "| method | plain | +MAN ζ=0.1 | gain |"
    assert table[-1] == "test rmse of the mean of all clients, lower is better"
    values = [[_rmse(f"grid/zeta{z}-seed{s}") for s in (0, 1)] for z in ("0", "0.1")]
    plain, penalised = (float(np.mean(v)) for v in values)
    cell = table[2].strip("| ").split(" | ")
    assert float(cell[1].split(" ±")[0]) == pytest.approx(plain, abs=1e-3)
    assert float(cell[3]) == pytest.approx(plain - penalised, abs=1e-3), "a lower rmse is a gain"
    command(tmp_path / "grid", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "mine.npz: rounds to 900<" in page
    assert '<td class="">1</td>' in page, "the first round is below the target"
    main_ok(["results", "grid", "--out", "all.jsonl"])
    assert (tmp_path / "all.jsonl").read_text(encoding="utf-8").count('"headline": "rmse"') == 4


def _rmse(folder):
    return headline(RunFolder(folder).ending())


def test_a_sweep_of_natural_clients(tmp_path):
    """The clients' own test samples have a table, in the sweep and in the report."""
    found = arrays(lambda x: (x[:, 0] > 0).astype(np.int64))
    parts, test_parts = np.split(np.arange(40), 4), np.split(np.arange(20), [3, 8, 9])
    data = fedman.data.from_arrays(*found.values(), parts=parts, test_parts=test_parts)
    grid = cells({**TINY, "dataset": "custom", "partition": "natural", "zeta": "0,0.1", "seed": "0,1"})
    sweep.run(grid, {("custom", None): data}, tmp_path / "grid", "cpu", [lambda record: None] * 4, print)
    whole, clients = sweep.tables(grid, tmp_path / "grid")
    assert whole.title == "test accuracy of the mean of all clients, %"
    assert clients.title == "test accuracy on the clients' own test samples, %"
    assert clients.header == ["method", "ζ", "mean", "worst tenth", "spread"]
    assert [row[:2] for row in clients.rows] == [["FedAvg", "0"], ["FedAvg", "0.1"]]
    each = [RunFolder(tmp_path / "grid" / cell.name).ending()["clients"]["each"] for cell in grid]
    assert [len(values) for values in each] == [4] * 4
    worst = [min(values) for values in each[:2]]
    assert clients.rows[0][3] == f"{np.mean(worst):.2f} ± {np.std(worst, ddof=1):.2f}"
    command(tmp_path / "grid", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "custom: the clients" in page
    assert clients.rows[0][3] in page
    assert 'id="custom-natural-clients"' in page


def test_the_last_lines_of_a_run(tmp_path, capsys):
    """Other figures of the task have a line of their own, and so have the clients."""
    config = resolve({"dataset": "shakespeare", "rounds": 2, "target": 40})
    own = {"mean": 31.0, "worst_tenth": 12.5, "spread": 4.0, "each": [31.0]}
    text = SUMMARY | {"perplexity": {"all": 7.25}, "clients": own, "rounds_to_target": 2}
    print_result(config, text, tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "FedAvg: all 50.00 %; 40 % in round 2; 1.0 s on cpu, fp32",
        "perplexity all 7.250",
        "clients on their own samples: accuracy mean 31.00 %  worst tenth 12.50 %  spread 4.00 %",
        f"written to {tmp_path}",
    ]
    numbers = {k: v for k, v in SUMMARY.items() if k != "accuracy"}
    numbers |= {"headline": "rmse", "lower_is_better": True, "rmse": {"all": 1234.5, "cloud": 0.5}, "mae": {"all": 0.4}}
    print_result(config, numbers, tmp_path)
    assert capsys.readouterr().out.splitlines()[:2] == [
        "FedAvg: rmse all 1234  cloud 0.5000; 40 in round 2+; 1.0 s on cpu, fp32",
        "mae all 0.4000",
    ]


def test_progress_names_the_headline():
    record = {k: v for k, v in RECORD.items() if k not in ("accuracy", "man")}
    assert format_round(record | {"rmse": {"all": 0.51234}, "mae": {"all": 0.4}}) == "loss 1.000 rmse 0.5123"
    assert format_round(record | {"accuracy": {"all": 50.0}, "perplexity": {"all": 7.0}}) == "loss 1.000 50.00 %"
    assert format_round(record | {"rmse": {}}) == "loss 1.000"


def test_the_headline_is_the_first_figure_of_a_record(tmp_path):
    """Whatever the order in which a task names its figures."""
    fedman.run(
        dataset=tuple(arrays(lambda x: x[:, :1]).values()), task="tests.cli.test_headlines:Fit", model="mlp",
        clients=2, participation=1, rounds=1, epochs=1, partition="iid", out=tmp_path,
    )  # fmt: skip
    (record,) = (json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines())
    assert format_round(record).split()[2] == "r2"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["headline"], summary["lower_is_better"]) == ("r2", False)
    assert {"r2", "mae"} <= summary.keys()


class Fit(fedman.tasks.Regression):
    """A user's own task, compared by the share of variance that is explained."""

    headline = "r2"
    higher_is_better = True

    def summarise(self, means):
        return {"mae": means["mae"], "r2": 1 - means["loss"]}
