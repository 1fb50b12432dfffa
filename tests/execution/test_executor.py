"""The threads of a pool on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRODUCT = """
import os, threading, torch
from fedman.execution.executor import Executor
x, executor = torch.ones(1000, 1000), Executor(None, torch.device("cpu"), threading.Event())
before = os.listdir("/proc/self/task")
executor.map(x.matmul, [x])
print(len(os.listdir("/proc/self/task")) - len(before))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads cannot be counted")
@pytest.mark.slow
def test_the_first_product_of_a_thread_is_on_one_core():
    """As all others are: its last bit could depend on the number of cores."""
    words = [sys.executable, "-c", PRODUCT]
    done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "4"}, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
