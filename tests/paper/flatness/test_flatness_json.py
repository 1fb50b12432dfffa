"""`flatness.json`: what is kept, what is replaced, copies with fewer digits, damaged files."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedman.cli.commands import main
from fedman.errors import UserError
from fedman.paper.flatness import flatness_json
from fedman.paper.flatness.flatness_json import copy_compact
from fedman.runs.folder import RunFolder
from tests.paper.flatness.flatness_calls import flatness, found, refused


def test_measurements_gather_and_replace_their_like(runs):
    flatness("plain", "--top", "3")
    flatness("plain", "--trace", "--samples", "20")
    m = found(runs / "plain")
    assert len(m["top"]["values"]) == 3
    assert (m["trace"]["samples"], m["top"]["samples"]) == (20, 72)
    flatness("plain", "--top", "2", "--model", "all,cloud")
    assert len(found(runs / "plain")["top"]["values"]) == 2
    assert "trace" in found(runs / "plain")
    assert set(found(runs / "plain", "cloud")) == {"loss", "top"}


RUN = {"method": "A", "dataset": "digits", "partition": "iid", "clients": 4, "model": "mlp", "algorithm": "fedavg",
       "zeta": 0, "rounds": 2, "seed": 0}  # fmt: skip
TOP = {"ends": "top", "tol": 1e-4, "values": [1.23456789, None, 3], "residuals": [0.0], "converged": 1, "more": "x"}


def test_several_processes_may_measure_a_run(runs):
    """None loses what another has measured, nor does the manifest."""

    def add(name):
        for n in range(5):
            flatness_json.add(runs / "plain", RUN, f"{name}{n}", "top", TOP)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(add, "abc")) == [None] * 3
    assert set(flatness_json.read(runs / "plain/flatness.json")["models"]) == {
        f"{k}{n}" for k in "abc" for n in range(5)
    }
    assert flatness_json.NAME in RunFolder(runs / "plain").check()


def test_numbers_that_are_not_finite_are_shown(runs, capsys):
    """A layer's curvature can overflow; all else that was measured is still printed and drawn."""
    trace = {"value": math.nan, "error": math.nan, "converged": False}
    blocks = {
        "linears.0": {"top": math.nan, "trace": trace, "input_norm": 2.0},
        "head": {"top": 3.0, "trace": trace | {"value": 4.0}, "input_norm": 2.0},
    }
    flatness_json.add(runs / "plain", RUN, "all", "layers", {"blocks": blocks})
    flatness("plain", "--top", "1")
    shown = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["linears.0", "nan", "nan", "±", "nan"] in [words[1:6] for words in shown]
    assert ["head", "3", "4", "±", "nan"] in [words[1:6] for words in shown]
    assert (runs / "plain/flatness-layers.png").exists()


def test_copies_have_five_digits(runs, capsys):
    words = ["results", "plain", "--out", "all.jsonl", "--flatness", "hessian"]

    def told() -> tuple[int, str]:
        with pytest.raises(SystemExit) as stopped:
            main(words)
        captured = capsys.readouterr()
        return stopped.value.code, captured.out + captured.err

    code, said = told()
    assert code == 2
    assert "no flatness.json here" in said
    record = {"format": 1, "run": RUN | {"config": {"lr": 0.123456789}}, "models": {"all": {"top": TOP}}}
    (runs / "plain/flatness.json").write_text(json.dumps(record))
    code, said = told()
    assert code == 0
    assert "flatness of 1 runs" in said
    kept = json.loads((runs / "hessian/plain.flatness.json").read_text())
    assert kept["models"] == {"all": {"top": TOP | {"values": [1.2346, None, 3]}}}
    assert kept["run"] == record["run"], "the configuration is not rounded"
    (runs / "plain/flatness.json").write_text("{")
    assert "flatness.json: not a JSON file" in told()[1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "not a JSON file"),
        ([], "not measurements in format 1"),
        ({"format": 2}, "not measurements in format 1"),
        ({"format": 1, "models": {}}, "run is missing"),
        ({"format": 1, "run": RUN, "models": {}}, "model: no measurement of all in plain"),
        ({"format": 1, "run": RUN, "models": {"all": {"top": {}}}}, "models.all.top.values is missing"),
        (
            {"format": 1, "run": RUN, "models": {"all": {"top": TOP | {"values": ["1"]}}}},
            "models.all.top.values.0 should be a valid number, not '1'",
        ),
        (
            {"format": 1, "run": RUN, "models": {"all": {"layers": {"blocks": {"x": {}}}}}},
            "models.all.layers.blocks.x.top is missing",
        ),
        (
            {
                "format": 1,
                "run": RUN,
                "models": {"all": {"landscape": {"seed": 0, "offsets": [0], "losses": [[1], []]}}},
            },
            "models.all.landscape must hold a loss for each of two offsets",
        ),
    ],
)
def test_a_damaged_file_is_named(runs, capsys, record, message):
    (runs / "plain/flatness.json").write_text(record if isinstance(record, str) else json.dumps(record))
    assert message in refused(capsys, "--plot", "plain")


def test_copies_of_two_runs_under_one_name_are_refused(tmp_path):
    for place, seed in (("a", 0), ("b", 1), ("c", 0)):
        (tmp_path / place / "run").mkdir(parents=True)
        record = {"format": 1, "run": RUN | {"seed": seed}, "models": {"all": {"top": TOP}}}
        (tmp_path / place / "run/flatness.json").write_text(json.dumps(record))
    out = tmp_path / "kept"
    with pytest.raises(
        UserError, match=r"run\.flatness\.json: would be of two runs, the other in .*/b/run; copy one to "
    ):
        copy_compact([tmp_path / "a", tmp_path / "b"], out)
    assert not out.exists()
    for place in "ac":
        assert copy_compact([tmp_path / place], out) == f"flatness of 1 runs in {out}"
    with pytest.raises(UserError, match="would be of two runs"):
        copy_compact([tmp_path / "b"], out)
