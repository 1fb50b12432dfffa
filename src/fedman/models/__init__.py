"""The models of the paper, two small ones for small data, and ResNet-18 with GroupNorm. Plain modules.

None of them knows about MAN, clients or stacking: taps are found by `fedman.penalties.man`, stacking is done by
`fedman.execution.stacked`. No batch statistics anywhere, so that a client's loss depends on its own weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from fedman.errors import UserError


class ConvNet(nn.Module):
    """Stages of conv, [GroupNorm,] ReLU, 2×2 max-pool; then linear layers with ReLU; then the logits.

    Both CNNs of the paper have this form (`cifar_cnn`, `tiny_cnn`).
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
            raise UserError(f"model: images of {shape[1]}x{shape[2]} are too small for this CNN; try model=mlp")
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


class MLP(nn.Module):
    """Flatten, linear layers with ReLU, logits."""

    def __init__(self, shape: Sequence[int], classes: int, hidden: Sequence[int] = (64, 32)) -> None:
        super().__init__()
        inputs = 1
        for n in shape:
            inputs *= n
        widths = [inputs, *hidden]
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.relus = nn.ModuleList(nn.ReLU() for _ in hidden)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for linear, relu in zip(self.linears, self.relus, strict=True):
            x = relu(linear(x))
        return self.head(x)


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


def cifar_cnn(shape: Sequence[int], classes: int) -> ConvNet:
    """The paper's CIFAR model: 797,962 parameters for CIFAR-10, 815,332 for CIFAR-100."""
    return ConvNet(shape, classes)


def tiny_cnn(shape: Sequence[int], classes: int) -> ConvNet:
    """The paper's Tiny-ImageNet model: 2,447,688 parameters for 200 classes of 64×64 images."""
    return ConvNet(shape, classes, (64, 64, 64), kernel=3, padding=1, groups=4, hidden=(512, 384))


def small_cnn(shape: Sequence[int], classes: int) -> ConvNet:
    """A CNN of the same form for images of 8×8 and up: two 3×3 stages of 16 and 32 channels."""
    return ConvNet(shape, classes, (16, 32), kernel=3, padding=1, hidden=(64,))


MODELS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "cifar_cnn": cifar_cnn,
    "tiny_cnn": tiny_cnn,
    "small_cnn": small_cnn,
    "mlp": MLP,
    "resnet18_gn": ResNet18,
}


def build(name: str, shape: Sequence[int], classes: int) -> nn.Module:
    """The model `name` for images (or rows) of `shape` and `classes` outputs, with PyTorch's default init."""
    if name not in MODELS:
        raise UserError(f"model: {name!r} is not one of {', '.join(MODELS)}; hand a module of your own to fedman.run")
    if name in ("cifar_cnn", "tiny_cnn", "small_cnn", "resnet18_gn") and len(shape) != 3:
        raise UserError(f"model: {name} needs images, the data has rows of shape {tuple(shape)}; try model=mlp")
    return MODELS[name](shape, classes)
