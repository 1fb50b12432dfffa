"""`fedman flatness --theory` on fewer rounds and samples."""

from __future__ import annotations

import json

from fedman.paper.flatness import theory_demonstration
from tests.paper.flatness.flatness_calls import flatness


def test_theory(runs, monkeypatch, capsys):
    for name, value in {"ROUNDS": 2, "EVERY": 1, "SAMPLES": 4, "FOLLOWED": 16}.items():
        monkeypatch.setattr(theory_demonstration, name, value)
    flatness("--theory", "--out", "theory")
    out = capsys.readouterr().out
    assert "FAILS" not in out
    assert "convs.1" in out
    record = json.loads((runs / "theory/theory.json").read_text())
    assert set(record["statements"]) == {"FedAvg", "FedAvg+MAN"}
    for lines in record["statements"].values():
        assert len(lines) == 17
        assert all(line["holds"] in (True, None) for line in lines)
    assert [t for t, _, _ in record["paths"]["FedAvg"]["linears.1"]] == [0, 1, 2]
    assert (runs / "theory/theory.png").exists()
