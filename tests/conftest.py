"""Tests share one core each (the suite runs on all cores at once), and each begins with the same random numbers."""

import signal

import torch

torch.set_num_threads(1)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's children would ignore the signals that tests send them


def pytest_runtest_setup() -> None:
    """A model that a test does not seed must not depend on which tests its process played before."""
    torch.manual_seed(0)
