"""ResNet-18 with GroupNorm in place of batch-norm."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class Residual(nn.Module):
    """Two 3×3 convs with GroupNorm(2) and a shortcut; the shortcut is a 1×1 conv where the shape changes."""

    def __init__(self, c: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c, o, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, o)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, o)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c != o:
            self.shortcut = nn.Sequential(nn.Conv2d(c, o, 1, stride, bias=False), nn.GroupNorm(2, o))
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        return self.relu2(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images (3×3 stem, no stem pooling) with GroupNorm(2) in place of batch-norm."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(shape[0], 64, 3, 1, 1, bias=False), nn.GroupNorm(2, 64), nn.ReLU())
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        self.blocks = nn.Sequential(*(Residual(c, o, 1 if c == o else 2) for c, o in pairwise(widths)))
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))
