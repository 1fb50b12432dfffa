"""What the kernels compute, in plain PyTorch for any device and type; gradients come from autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedman.models.convnet import ConvNet
from fedman.models.parameters import ParameterLayout
from fedman.penalties.man import ActivationNorm, Layers


def convolution(x: Tensor, w: Tensor, bias: Tensor, padding: int, stride: int = 1) -> Tensor:
    """Maps [S, B, OH, OW, O] of images x [S, B, H, W, C], weights [S, O, C, k, k], biases [S, O]."""
    rows = [F.conv2d(a.movedim(-1, 1), b, c, stride, padding) for a, b, c in zip(x, w, bias, strict=True)]
    return torch.stack(rows).movedim(2, -1)


def activation(
    z: Tensor, share: Tensor, groups: int = 0, norm: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Pooled map [S, B, PH, PW, O] and MAN term [S] of maps z; `norm` are GroupNorm's scale and shift [S, O]."""
    rows = z.movedim(-1, 2)
    if norm is not None:
        rows = torch.stack([F.group_norm(r, groups, g, b) for r, g, b in zip(rows, *norm, strict=True)])
    a = F.relu(rows)
    return F.max_pool2d(a.flatten(0, 1), 2).unflatten(0, share.shape).movedim(2, -1), mean_squares(a, share)


def mean_squares(a: Tensor, share: Tensor) -> Tensor:
    """Σ_b share_b · mean of squares of sample b: [S] from a [S, B, ...]."""
    return (share * a.flatten(2).square().mean(2)).sum(1)


def linear(x: Tensor, w: Tensor, bias: Tensor, hidden: bool, share: Tensor) -> tuple[Tensor, Tensor]:
    """x [S, B, I] through weights [S, N, I] and biases [S, N], ReLU if `hidden`, and the MAN term [S]."""
    out = torch.baddbmm(bias[:, None], x, w.mT)
    out = F.relu(out) if hidden else out
    return out, mean_squares(out, share)


def cross_entropy(logits: Tensor, y: Tensor, share: Tensor) -> Tensor:
    """Σ_b share_b · cross-entropy of sample b: [S]."""
    return (share * F.cross_entropy(logits.movedim(-1, 1), y, reduction="none")).sum(1)


def clip_update(w: Tensor, g: Tensor, lr: Tensor, clip: float, decay: float) -> Tensor:
    """w − lr·(g·min(1, clip/(‖g‖ + 1e-6)) + decay·w) by row."""
    factor = (clip / (g.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1)
    return w - lr.reshape(-1, 1) * (g * factor + decay * w)


def losses(
    model: ConvNet, W: Tensor, x: Tensor, y: Tensor, weight: Tensor | None = None, layers: Layers = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy [S] and MAN terms [S, L] of `model` itself, one client after the other."""
    share = torch.ones(y.shape, dtype=W.dtype, device=W.device) if weight is None else weight
    share = share / share.sum(1, keepdim=True)
    layout, man = ParameterLayout.of(model), ActivationNorm(model, layers)
    ce, terms = [], []
    for row, images, labels, part in zip(W, x, y, share, strict=True):
        logits = functional_call(model, layout.unflatten(row), (images.movedim(-1, 1),))
        ce.append(cross_entropy(logits[None], labels[None], part[None])[0])
        terms.append(torch.stack(list(man.terms(part).values())))
    man.remove()
    return torch.stack(ce), torch.stack(terms)
