"""docs/poisoning.md: its tables name what there is, its rule and its commands work as printed."""

import importlib
import re
from pathlib import Path

import torch

import fedman
from fedman.aggregation import AGGREGATIONS
from fedman.paper.presets import find_sweep
from fedman.parts import hyperparameters
from fedman.runs.grid import cells
from fedman.runs.key_text import overrides
from fedman.training.attacks import ATTACKS

PAGE = (Path(__file__).parents[2] / "docs" / "poisoning.md").read_text(encoding="utf-8")


def test_the_tables_name_what_there_is_with_its_defaults():
    lines = PAGE.split("\nMeasured on")[0].splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    assert set(AGGREGATIONS) <= rows.keys()
    assert set(ATTACKS) - {"none"} <= rows.keys()
    for registry in (AGGREGATIONS, ATTACKS):
        for name, part in registry.items():
            for key, default in hyperparameters(part).items():
                where = PAGE if key == "attackers" or name == "multi-krum" else rows[name]
                assert f"`{key}={default:g}`" in where


def test_the_rule_of_the_page_runs_as_printed_and_withstands_an_attack(tmp_path, monkeypatch):
    (tmp_path / "my_rules.py").write_text(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    rule = importlib.import_module("my_rules").GeometricMedian(iterations=50)
    rows = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1e9, 1e9]]).double()
    found = rule.aggregate({"w": rows}, torch.ones(5).double(), {})["w"]
    assert (found - 0.5).norm() < 1
    keys = {"clients": 4, "participation": 1.0, "rounds": 1, "epochs": 1, "attack": "scaled", "device": "cpu"}
    result = fedman.run(**keys, aggregation="my_rules:GeometricMedian", iterations=3)
    assert result.summary["config"]["iterations"] == 3


def test_the_commands_of_the_page_are_sweeps_over_all_rules_and_attacks():
    lines = re.findall(r"^fedman sweep (.*)$", PAGE, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        words = line.split()
        preset = find_sweep(words[words.index("--preset") + 1]) if "--preset" in words else None
        grid = cells(overrides(word for word in words if "=" in word), preset)
        assert {cell.config.aggregation for cell in grid} == set(AGGREGATIONS)
        assert {cell.config.attack for cell in grid} == set(ATTACKS)
        assert len({cell.config.zeta for cell in grid}) == 2
