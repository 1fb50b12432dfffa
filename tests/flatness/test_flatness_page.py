"""What docs/flatness.md prints on sharpness runs as printed, and its figures are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fedman.flatness import Ascent
from tests.flatness.flat_cases import gauss_newton

PAGE = (Path(__file__).parents[2] / "docs" / "flatness.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Sharpness beyond the Hessian")[1].split("\n## ")[0]


def test_the_example_runs_as_printed(capsys) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    names: dict = {}
    exec(code, names)
    top, trace, average, worst, cube, groups = map(float, capsys.readouterr().out.split())
    matrix = gauss_newton(names["model"], names["x"])
    assert top == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), abs=1e-3)
    assert trace == pytest.approx(float(matrix.trace()), rel=0.05)
    assert 0 < average < worst < groups
    assert 0 < cube < worst


def test_the_commands_radii_and_steps_are_those_of_the_page() -> None:
    from fedman.paper.flatness.measure import RADII, Request

    text = " ".join(SECTION.split())
    average, ball, cube = RADII.values()
    assert f"ρ = {average} on average, {ball} in the worst case for p = 2, {cube} for p = ∞" in text
    assert f"groups of `--m {Request().m}`" in text
    assert f"with {Ascent(1).steps} steps from the model" in text
    assert "`--radius` multiplies" in text
