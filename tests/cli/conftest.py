"""A folder to work in, with data files in it that are bad."""

import gzip
import tarfile
import zipfile

import numpy as np
import pytest


def furnish(tmp_path):
    """A few data files, most of them bad, for the settings that name them."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 6)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=rows, y=np.arange(40) % 2)
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 not really")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    with tarfile.open(damaged / "cifar-100-binary.tar.gz", "w:gz"):
        pass
    for name in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        with gzip.open(damaged / f"{name}.gz", "wb") as file:
            file.write(b"\0\0\x08\x03")
    with zipfile.ZipFile(damaged / "tiny-imagenet-200.zip", "w") as file:
        file.writestr("tiny-imagenet-200/wnids.txt", "n0\n")


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a few bad data files in it; returns what it holds."""
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    return sorted(p for p in tmp_path.rglob("*"))
