"""The gathering kernel against the plain augmentation."""

from __future__ import annotations

import pytest
import torch

from fedman.data import augment
from fedman.kernels import first_stage
from fedman.kernels.gather import gather
from fedman.training.randomness import plan


@pytest.mark.parametrize(("size", "channels", "crop"), [((9, 12), 3, True), ((20, 17), 1, True), ((8, 8), 3, False)])
def test_equals_the_plain_augmentation(size, channels, crop, device):
    data = torch.randint(0, 256, (40, *size, channels), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 7, (40,), device=device)
    index = torch.stack([torch.randperm(40, device=device)[:12] for _ in range(3)])
    drawn = plan(3, 1, [4, 0, 9], [12, 12, 12], 2, 5, device, pad=augment.PAD)
    mean, std = (0.5, 0.4, 0.3)[:channels], (0.2, 0.3, 0.25)[:channels]
    affine = augment.affine(mean, std, torch.float32, device)
    margin = augment.PAD if crop else None
    for j, padding in ((0, 0), (3, 1), (5, 2)):
        step = torch.tensor([j], device=device)
        x, y = gather(data, labels, index, drawn.sample, drawn.window, step, affine, margin, padding, torch.float32)
        where = index.gather(1, drawn.sample[:, j])
        window = drawn.window[:, :, j] if crop else None
        want = augment.gather(data, where, window, mean, std, torch.float32)
        torch.testing.assert_close(x, first_stage.prepare(want, padding, torch.float32), rtol=1e-6, atol=1e-6)
        assert torch.equal(y, labels[where])
