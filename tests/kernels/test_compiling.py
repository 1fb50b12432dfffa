"""Kernels compiled side by side: for a GPU that need not be there, in a process without Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import threading
from types import SimpleNamespace

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

loaded, compiled = [], []


class Card:
    launcher_cls = staticmethod(lambda src, metadata: lambda *launch: print("launched"))
    utils = SimpleNamespace(
        load_binary=lambda *given: (loaded.append(threading.get_ident()), 1, 0, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


driver.set_active(Card())
knobs.compilation.listener = lambda **about: compiled.append(about["cache_hit"])

from fedman.kernels.compiling import side_by_side
from fedman.kernels.convnet import StackedConvNet
from fedman.kernels.update import clip_update
from fedman.models.convnet import ConvNet

model = ConvNet((3, 8, 8), 3, (16,), kernel=3, padding=1, hidden=(), groups=0)
net = StackedConvNet(model, (3, 8, 8), "bf16")
W = torch.zeros(2, sum(p.numel() for p in model.parameters()))
x, y = net.prepare(torch.zeros(2, 4, 8, 8, 3)), torch.zeros(2, 4, dtype=torch.int64)


def step():
    _, _, gradient = net.gradient(W, x, y, torch.tensor(0.1))
    clip_update(W, gradient, torch.tensor(0.1), 10.0, 0.0, 0.0)


with side_by_side():
    step()
    assert not threading.get_ident() in loaded
count = len(compiled)
assert count == len(loaded) > 8, (count, loaded)
assert not any(compiled)
assert threading.get_ident() not in loaded
with side_by_side():  # nothing is left to compile
    step()
assert len(compiled) == count
print("earnest")
clip_update(W, W, torch.tensor(0.1), 10.0, 0.0, 0.0)
assert len(compiled) == count  # launched as it was compiled
"""


@pytest.mark.slow
def test_all_are_compiled_and_loaded_and_none_is_launched(tmp_path):
    apart = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    script = tmp_path / "script.py"  # in a file: Triton reads the source
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | apart, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["earnest", "launched", "launched"]
