"""The threads of a pool on a CPU."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch

from fedman.execution.device import one_thread_each, usual_threads
from fedman.execution.executor import Executor

CPU = torch.device("cpu")

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


def test_runs_in_several_threads_work_on_one_core_each_and_leave_torchs_threads_as_they_were():
    """One begins while another is at work, and goes on after it."""
    both, one_left = Event(), Event()

    def first():
        with one_thread_each(CPU):
            both.wait(60)
        one_left.set()

    def items():
        one_left.wait(60)
        yield 0

    def second():
        with one_thread_each(CPU):
            both.set()
            return usual_threads(), Executor(None, CPU, Event()).map(lambda _: torch.get_num_threads(), items())

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with ThreadPoolExecutor(2) as pool:
            pool.submit(first)
            assert pool.submit(second).result(120) == (3, [1])
        with ThreadPoolExecutor(1) as pool:  # a new thread
            assert pool.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)
