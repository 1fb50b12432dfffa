"""`fedman flatness --theory` on fewer rounds and samples."""

from __future__ import annotations

import json

import pytest

from fedman.paper.flatness import convergence, theory_demonstration
from tests.paper.flatness.flatness_calls import flatness


@pytest.mark.slow
def test_theory(runs, monkeypatch, capsys):
    for name, value in {"ROUNDS": 2, "EVERY": 1, "SAMPLES": 4, "FOLLOWED": 16}.items():
        monkeypatch.setattr(theory_demonstration, name, value)
    monkeypatch.setattr(convergence, "ROUNDS", 4)
    flatness("--theory", "--out", "theory")
    out = capsys.readouterr().out
    assert "FAILS" not in out
    assert "convs.1" in out
    record = json.loads((runs / "theory/theory.json").read_text())
    assert set(record["statements"]) == {"FedAvg", "FedAvg+MAN"}
    for lines in record["statements"].values():
        assert len(lines) == 24
        assert all(line["holds"] in (True, None) for line in lines if line["proved"])
        (alone,) = [line for line in lines if line["about"].endswith("alone")]
        assert not alone["holds"]
    rows = {(row[0], row[-1]) for row in record["theorems"]["rows"]}
    assert ("theorem, convolutions", "fails") in rows
    assert ("Proposition 1", "holds") in rows
    assert record["counterexample"]["left"] == pytest.approx(16 * record["counterexample"]["right"])
    assert [t for t, _, _ in record["paths"]["FedAvg"]["linears.1"]] == [0, 1, 2]
    assert (runs / "theory/theory.png").exists()


@pytest.mark.parametrize("problem", convergence.PROBLEMS)
def test_convergence(problem):
    """Both sides on a few rounds; with steps far beyond what is allowed the right side says nothing."""
    found = convergence.check(problem, rounds=4)
    assert found.holds
    assert 0 < found.left < found.right
    assert found.reach == pytest.approx(1 / 3)
    far = convergence.check(problem, reach=3.0, rounds=4)
    assert far.left != found.left
    assert far.right > found.right  # 9 (ηKL)² σ²


def test_the_inequality_by_hand():
    """F = w²/2 on every client: σ = 0, L = 1 (times the margin of 1.05), and each round shrinks w by (1 − η)^K."""
    import torch

    convergence.PROBLEMS["bowl"] = (lambda w, x, y: w.square().sum() / 2, 1)
    try:
        found = convergence.check("bowl", rounds=3)
    finally:
        del convergence.PROBLEMS["bowl"]
    generator = torch.Generator().manual_seed(0)
    convergence._clients(generator)
    w = float(torch.randn(1, generator=generator, dtype=torch.float64))
    shrink = (1 - 1 / 3 / (convergence.STEPS * 1.05)) ** convergence.STEPS
    assert found.smoothness == pytest.approx(1.05)
    assert found.difference == pytest.approx(0, abs=1e-20)
    assert found.left == pytest.approx(w**2 * (1 + shrink**2 + shrink**4) / 3)
    low = w * shrink**2 * (1 - 1 / 1.05) ** 3
    assert found.right == pytest.approx(4 * (w**2 - low**2) / 2 / (3 / 3.15))
