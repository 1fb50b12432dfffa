"""Tests share one core each (the suite runs on all cores at once), and each begins with the same random numbers."""

import os
import shutil
import signal
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")  # the same examples every time, however slow the machine
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2**31 and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # tests wait for every sync of a file, not for a disk
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's children would ignore the signals that tests send them


def pytest_runtest_setup() -> None:
    """A model that a test does not seed must not depend on which tests its process played before."""
    torch.manual_seed(0)
