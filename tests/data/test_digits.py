"""The embedded digits."""

from __future__ import annotations

import numpy as np

from fedman import data
from fedman.data import dataset


def test_digits() -> None:
    digits = data.load("digits")
    assert digits.x_train.shape == (1437, 8, 8, 1)
    assert digits.x_test.shape == (360, 8, 8, 1)
    assert digits.shape == (1, 8, 8)
    assert digits.x_train.min() == 0
    assert digits.x_train.max() == 255
    assert np.unique(np.concatenate([digits.x_train, digits.x_test])).size == 17
    assert np.bincount(digits.y_train).tolist() == [143, 146, 142, 146, 144, 145, 144, 143, 141, 143]
    assert not digits.augment
    first = [0, 0, 5, 13, 9, 1, 0, 0]
    assert digits.x_train[0, 0, :, 0].tolist() == [round(v * 255 / 16) for v in first]
    mean, std = dataset.channel_statistics(digits.x_train)
    np.testing.assert_allclose((*mean, *std), (*digits.mean, *digits.std), atol=5e-5)
