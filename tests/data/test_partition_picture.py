"""The picture of a partition: both formats, always the same bytes, errors in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedman.data import partition, partition_picture
from fedman.errors import UserError


@pytest.mark.parametrize(("clients", "classes"), [(10, 10), (100, 100), (3, 2), (2500, 5)])
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_draw(tmp_path: Path, suffix: str, clients: int, classes: int) -> None:
    labels = np.random.default_rng(0).integers(0, classes, 10_000)
    parts = partition.split(labels, "dir0.3", clients, classes=classes, sigma=0.3)
    paths = tmp_path / f"new/a{suffix}", tmp_path / f"b{suffix}"
    for path in paths:
        partition_picture.draw(labels, parts, classes, path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    if suffix == ".png":
        from PIL import Image

        picture = Image.open(paths[1]).convert("RGB")
        assert min(picture.size) > 400
        assert len(picture.getcolors(1 << 24)) > 30
    else:
        assert b"<svg" in first
        assert len(first) < 500_000


def test_draw_refuses(tmp_path: Path) -> None:
    labels = np.arange(100) % 2
    parts = partition.split(labels, "iid", 2, classes=2)
    with pytest.raises(UserError, match=r"must end in \.png or \.svg"):
        partition_picture.draw(labels, parts, 2, tmp_path / "a.gif")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        partition_picture.draw(labels, parts, 2, tmp_path / "file/a.png")
