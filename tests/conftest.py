"""Tests share one core each: the suite runs on all cores at once."""

import torch

torch.set_num_threads(1)
