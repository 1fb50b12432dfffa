"""CNNs of one form: the paper's two, and a small one for small images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.models import ANY_SHAPE


class ConvNet(nn.Module):
    """Stages of conv, [GroupNorm,] ReLU, 2×2 max-pool; then linear layers with ReLU; then the logits.

    The activations are modules, `relus`: those of the stages first, then those of the linear layers.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        channels: Sequence[int] = (64, 64),
        kernel: int = 5,
        padding: int = 0,
        groups: int = 0,
        hidden: Sequence[int] = (384, 192),
    ) -> None:
        super().__init__()
        self.channels, self.kernel, self.padding, self.groups = channels, kernel, padding, groups
        c, height, width = shape
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList()
        self.relus = nn.ModuleList(nn.ReLU() for _ in (*channels, *hidden))
        for o in channels:
            self.convs.append(nn.Conv2d(c, o, kernel, padding=padding))
            self.norms.append(nn.GroupNorm(groups, o) if groups else nn.Identity())
            c = o
            height, width = ((n + 2 * padding - kernel + 1) // 2 for n in (height, width))
        if min(height, width) < 1:
            raise UserError(f"model: images of {shape[1]}x{shape[2]} are too small for this CNN; try model={ANY_SHAPE}")
        widths = [c * height * width, *hidden, classes]
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        relus = iter(self.relus)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.max_pool2d(next(relus)(norm(conv(x))), 2)
        x = x.flatten(1)
        for linear, relu in zip(self.linears, relus, strict=False):
            x = relu(linear(x))
        return self.linears[-1](x)


def cifar_cnn(shape: Sequence[int], classes: int) -> ConvNet:
    """The paper's CIFAR model: 797,962 parameters for CIFAR-10, 815,332 for CIFAR-100."""
    return ConvNet(shape, classes)


def tiny_cnn(shape: Sequence[int], classes: int) -> ConvNet:
    """The paper's Tiny-ImageNet model: 2,447,688 parameters for 200 classes of 64×64 images."""
    return ConvNet(shape, classes, (64, 64, 64), kernel=3, padding=1, groups=4, hidden=(512, 384))


class DropoutCNN(nn.Module):
    """pfl-research's CNN for CIFAR-10: two 3×3 convs of 32 and 64 channels, 2×2 max-pool, dropout 0.25, a linear layer
    of 128, dropout 0.5, logits; 1,626,442 parameters for CIFAR-10."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        c, height, width = shape
        height, width = ((n - 4) // 2 for n in (height, width))
        if min(height, width) < 1:
            raise UserError(f"model: images of {shape[1]}x{shape[2]} are too small for this CNN; try model={ANY_SHAPE}")
        self.features = nn.Sequential(
            *(nn.Conv2d(c, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25))
        )
        self.classifier = nn.Sequential(
            *(nn.Linear(64 * height * width, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, classes))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def small_cnn(shape: Sequence[int], classes: int) -> ConvNet:
    """A CNN of the same form for images of 8×8 and up: two 3×3 stages of 16 and 32 channels."""
    return ConvNet(shape, classes, (16, 32), kernel=3, padding=1, hidden=(64,))
