"""Two finished runs to measure."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import fedman


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Two finished runs, `plain` and `man`, of three classes of points seen by four clients."""
    root = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = (rng.normal(size=(90, 4)) + 2 * np.eye(3, 4)[y]).astype(np.float32)
    np.savez(root / "points.npz", x=x, y=y)
    for name, zeta in (("plain", 0.0), ("man", 0.1)):
        keys = {"dataset": f"npz:{root / 'points.npz'}", "clients": 4, "participation": 0.5, "partition": "iid"}
        fedman.run(**keys, rounds=25, zeta=zeta, out=root / name, device="cpu")
    return root


@pytest.fixture
def runs(made, tmp_path, monkeypatch) -> Path:
    """A copy of them in a folder of one's own."""
    for name in ("plain", "man"):
        shutil.copytree(made / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path
