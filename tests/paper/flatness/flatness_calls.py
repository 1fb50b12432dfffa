"""Calls of `fedman flatness` that succeed, and calls that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedman.cli.commands import main


def flatness(*words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["flatness", "--device", "cpu", *words])
    assert stopped.value.code == 0


def refused(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["flatness", *words])
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert captured.out == ""
    assert "Traceback (most recent" not in captured.err
    return captured.err


def found(folder: Path, model: str = "all") -> dict:
    return json.loads((folder / "flatness.json").read_text())["models"][model]
