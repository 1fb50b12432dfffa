"""ResNet-18 for small images, with GroupNorm or batch-norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn

Norm = Callable[[int], nn.Module]
"""A layer that normalises so many channels."""


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


class Residual(nn.Module):
    """Two 3×3 convs with norms and a shortcut; the shortcut is a 1×1 conv where the shape changes."""

    def __init__(self, c: int, o: int, stride: int, norm: Norm = group_norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c, o, 3, stride, 1, bias=False)
        self.norm1 = norm(o)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.norm2 = norm(o)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c != o:
            self.shortcut = nn.Sequential(nn.Conv2d(c, o, 1, stride, bias=False), norm(o))
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        return self.relu2(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images (3×3 stem, no stem pooling), by default with GroupNorm(2) in place of batch-norm.

    `width` channels in the first stage; `dropout` before the last layer.
    """

    def __init__(
        self, shape: Sequence[int], classes: int, norm: Norm = group_norm, width: int = 64, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(shape[0], width, 3, 1, 1, bias=False), norm(width), nn.ReLU())
        widths = [width * n for n in (1, 1, 1, 2, 2, 4, 4, 8, 8)]
        self.blocks = nn.Sequential(*(Residual(c, o, 1 if c == o else 2, norm) for c, o in pairwise(widths)))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.blocks(self.stem(x)).mean((2, 3))))


def resnet18_bn(shape: Sequence[int], classes: int) -> ResNet18:
    """ResNet-18 as published, with batch-norm, but for the stem."""
    return ResNet18(shape, classes, nn.BatchNorm2d)
