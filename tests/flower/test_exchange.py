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
    """But for a few, which the names of settings take."""

    def rows(text):
        found = re.findall(r"^\| ([\w-]+) \| (w.*) \| ([\d,]+) \| (w.*) \| ([\d,]+) \|$", text, re.MULTILINE)
        return {(name, down, up): [int(n.replace(",", "")) for n in (a, b)] for name, down, a, up, b in found}

    page = rows((ROOT / "docs/flower.md").read_text(encoding="utf-8"))
    words = [sys.executable, "benchmarks/flower.py", "--bytes"]
    printed = rows(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert len(page) == 8
    assert {key: printed[key] for key in page} == {key: pytest.approx(sizes, rel=1e-4) for key, sizes in page.items()}
