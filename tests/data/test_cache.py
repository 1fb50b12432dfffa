"""The cache of decoded images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedman.data import cache


def test_cache_of_another_key_or_shape_is_not_taken(tmp_path: Path) -> None:
    x, y = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3), np.array([3, 1])
    cache.save(tmp_path / "c.npy", b"k" * 32, x, y)
    found = cache.load(tmp_path / "c.npy", b"k" * 32, 2, (2, 2, 3))
    assert found is not None
    np.testing.assert_array_equal(found[0], x)
    np.testing.assert_array_equal(found[1], y)
    assert cache.load(tmp_path / "c.npy", b"l" * 32, 2, (2, 2, 3)) is None
    assert cache.load(tmp_path / "c.npy", b"k" * 32, 3, (2, 2, 3)) is None
    assert cache.load(tmp_path / "none.npy", b"k" * 32, 2, (2, 2, 3)) is None
