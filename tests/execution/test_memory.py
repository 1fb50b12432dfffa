"""Large tensors on a CPU come in huge pages, unless the user decides otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TENSOR = """
import resource, fedman, torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.empty(16 * 2**20).fill_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 16 * 2**20 * 4 // 4096  # small ones, of 64 MB
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def taken(**environment):
    """The pages that the kernel brings for a tensor of 64 MB."""
    plain = {name: v for name, v in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    words = [sys.executable, "-c", TENSOR]
    return int(subprocess.run(words, env=plain | environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(
    not SETTING.exists() or "[madvise]" not in SETTING.read_text(), reason="huge pages are not the program's choice"
)
@pytest.mark.slow
def test_a_large_tensor():
    assert any(taken() < PAGES / 4 for _ in range(5))  # where memory is in pieces, the kernel may have none at hand
    assert taken(THP_MEM_ALLOC_ENABLE="0") > PAGES / 2
