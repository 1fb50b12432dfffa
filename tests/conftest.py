"""Tests share one core each: the suite runs on all cores at once."""

import signal

import torch

torch.set_num_threads(1)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's children would ignore the signals that tests send them
