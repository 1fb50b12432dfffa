"""Which vectors each algorithm sends."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedman.algorithms import ALGORITHMS
from fedman.algorithms.fedlesam import FedLESAM
from fedman.algorithms.fedsmoo import FedSMOO
from fedman.flower.exchange import exchange

ROOT = Path(__file__).parents[2]


def test_only_what_the_other_side_cannot_compute_is_sent():
    """θ and what else a step reads down; up the client's model, and what depends on the client's memory."""
    names = {name: exchange(kind()) for name, kind in ALGORITHMS.items()}
    more = {name: e.down for name, e in names.items() if e.down != ("w",)}
    assert more == {
        "feddc": ("w", "g"),
        "scaffold": ("w", "c"),
        "fedcm": ("w", "d"),
        "mofedsam": ("w", "d"),
        "fedgamma": ("w", "c"),
        "fedsmoo": ("w", "s"),
    }
    assert {name: e.up for name, e in names.items() if e.up != ("w",)} == {"fedsmoo": ("w", "m")}
    assert exchange(FedLESAM(last_round=True)).down == ("w", "before")


@dataclass(frozen=True)
class Difference(FedSMOO):
    """Uploads a difference of two of a client's vectors."""

    def finish(self, w, server, client, hp):
        memory, upload = super().finish(w, server, client, hp)
        return memory, {**upload, "m": client["mu"] - client["m"]}


def test_a_difference_of_memories_is_sent_too():
    assert exchange(Difference()).up == ("w", "m")


@pytest.mark.slow
def test_the_bytes_on_the_page_are_those_that_the_benchmark_prints():
    page = (ROOT / "docs/flower.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [\w-]+ \| w.* \| [\d,]+ \|$", page, re.MULTILINE)
    assert len(rows) == 8
    printed = subprocess.run(
        [sys.executable, "benchmarks/flower.py", "--bytes"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {*rows} <= {*printed.stdout.splitlines()}
