"""docs/data.md: every snippet runs as printed, and prints what it says; every command works."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fedman import data
from fedman.data import partition

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```(python|sh)\n(.*?)```", PAGE, re.DOTALL)


def test_snippets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "my_parts", None)
    del sys.modules["my_parts"]  # now the test's own module is forgotten at its end
    names: dict = {}
    for kind, code in SNIPPETS:
        if code.startswith("import numpy as np\n\n\ndef by_label"):
            (tmp_path / "my_parts.py").write_text(code)
        elif kind == "python":
            exec(code, names)
            assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\) +# (.*)", code)
        else:
            for line in code.splitlines():
                command(line.split()[1:], capsys)
    assert len(SNIPPETS) == 5
    assert names["result"].summary["config"]["partition"] == "natural"


def command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command of the page; one that needs files that are not here says so."""
    from fedman.cli import main

    with pytest.raises(SystemExit) as end:
        main(words)
    shown = capsys.readouterr()
    if "--preset" in words:
        assert (end.value.code, "fedman data get cifar100" in shown.err) == (2, True)
    else:
        assert (end.value.code, shown.out.startswith("digits, my_parts:by_label: clients 5")) == (0, True)


def test_the_tables_name_all_there_is() -> None:
    names = set(re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`[^|]*) \|", PAGE, re.M))))
    assert names >= {*data.SPECS, *(scheme.form for scheme in data.SCHEMES.values())}
    for name in ("iid", "dir0.3", "path2", "natural", "file:PATH", "module:function"):
        assert name in names
        assert partition.parse(name)
