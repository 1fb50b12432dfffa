"""docs/man.md: its penalties run as printed, and its table names what exists."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call, vmap

import fedman
import fedman.penalties
from fedman.cli import main
from fedman.models import build
from fedman.penalties import PENALTIES, attach, check_terms

PAGE = (Path(__file__).parents[2] / "docs" / "man.md").read_text(encoding="utf-8")
OWN = PAGE.split("## A penalty of your own")[1]


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's file in the working directory; the rest of the suite's default type."""
    (tmp_path / "my_penalties.py").write_text(re.findall(r"```python\n(.*?)```", OWN, re.DOTALL)[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    yield
    sys.modules.pop("my_penalties", None)


@pytest.mark.usefixtures("printed")
def test_penalties_of_ones_own_are_their_formulas() -> None:
    model = build("mlp", (5,), 4)
    W = {name: torch.randn(3, *p.shape) for name, p in model.named_parameters()}
    x, weight = torch.randn(3, 6, 5), torch.rand(3, 6).softmax(1)
    for name, term, formula in (
        ("NamedLayers", "head", lambda out: (out**2).mean(1)),
        ("LogitVariance", "variance", lambda out: out.var(1, ddof=1)),
    ):
        penalty = PENALTIES[f"my_penalties:{name}"](0.1)
        attached = attach(penalty, model)

        def terms(w: dict[str, Tensor], x: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            out = functional_call(model, w, (x,))
            return out, dict(check_terms(penalty, attached.terms(weight)))  # noqa: B023

        out, found = vmap(terms)(W, x, weight)
        expected = [w.numpy() @ formula(o.numpy()) for w, o in zip(weight, out, strict=True)]
        np.testing.assert_allclose(found[term], expected, rtol=1e-5)


@pytest.mark.usefixtures("printed")
@pytest.mark.parametrize("line", re.findall(r"^fedman (run .*)$", OWN, re.MULTILINE))
def test_the_command_lines_run(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = "clients=4 participation=0.5 epochs=1 --device cpu --out out"
    monkeypatch.setattr(sys, "argv", ["fedman", *line.split(), *small.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (0, None), capsys.readouterr()
    assert Path("out/summary.json").exists()


def test_every_way_to_attach_the_term_works() -> None:
    """The first block of the page: each line that makes a term, on the paper's CNN."""
    block = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    ways = [line for line in block.splitlines() if line.startswith("man = ")]
    assert len(ways) == 5
    for way in ways:
        model = build("cifar_cnn", (3, 32, 32), 10)
        names = {"ActivationNorm": fedman.ActivationNorm, "model": model}
        exec(way, names | {"measure": lambda a: a.abs().flatten(1).mean(1)}, names)
        man = names["man"]
        model(torch.randn(4, 3, 32, 32))
        assert man().item() > 0
        assert ("output" in man.values) is ("output=False" not in way)
        man.remove()


def test_the_table_names_what_exists() -> None:
    table = dict(re.findall(r"^\| `([\w-]+)` \| `(\w+)` \|", PAGE, re.MULTILINE))
    assert {name: getattr(fedman.penalties, kind) for name, kind in table.items()} == PENALTIES.built_in
