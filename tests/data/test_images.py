"""uint8 of more than two axes means images with their channels last, for arrays and tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedman.data.images import holds_images, sample_shape


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize(
    ("x", "images", "shape"),
    [
        (np.zeros((2, 8, 6, 3), np.uint8), True, (3, 8, 6)),
        (np.zeros((2, 8, 6, 3), np.float32), False, (8, 6, 3)),
        (np.zeros((2, 7), np.int64), False, (7,)),
        (np.zeros((2, 7), np.uint8), False, (7,)),
    ],
)
def test_images_and_rows(convert, x, images, shape):
    assert holds_images(convert(x)) is images
    assert sample_shape(convert(x)) == shape
