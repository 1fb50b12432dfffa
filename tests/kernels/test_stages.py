"""ReLU, MAN, pool and GroupNorm: the fused first stage and the activation of stored maps against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedman.kernels import activation, conv, first_stage, gram
from fedman.kernels.stage import STORAGE, Stage
from tests.kernels import kernel_reference as reference
from tests.kernels.kernel_checks import TOLERANCE, relative, shares, with_precisions

# clients, batch, height, width, image channels, out, kernel, padding, groups, channels last
FIRST = [
    (1, 1, 8, 8, 3, 16, 5, 0, 0, True),
    (2, 7, 5, 7, 3, 16, 3, 1, 0, False),
    (2, 50, 4, 4, 1, 32, 3, 0, 0, True),
    (2, 3, 5, 6, 2, 16, 3, 1, 4, False),
    (1, 2, 7, 6, 1, 32, 5, 2, 2, True),
]
# clients, batch, map height, map width, channels, groups, channels last
STORED = [
    (1, 1, 10, 10, 64, 0, False),
    (2, 7, 5, 3, 16, 0, True),
    (2, 50, 2, 2, 16, 0, True),
    (2, 2, 7, 8, 32, 4, False),
    (1, 2, 6, 6, 64, 1, True),
    (1, 3, 8, 16, 64, 4, False),  # tiles without a gap
]


def pooled_strides(stage: Stage, channels_last: bool) -> tuple[int, int]:
    """Strides of a pixel and of a channel in the pooled output."""
    return (stage.out, 1) if channels_last else (1, stage.pooled)


def pooled_view(pooled: Tensor, stage: Stage, strides: tuple[int, int]) -> Tensor:
    clients, batch, _ = pooled.shape
    if strides[1] == 1:
        return pooled.view(clients, batch, stage.pooled, stage.out)
    return pooled.view(clients, batch, stage.out, stage.pooled).mT


def as_stored(gradient: Tensor, strides: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A gradient [S, B, PH, PW, O] in the layout of the pooled output."""
    gradient = gradient.flatten(2, 3)
    return (gradient if strides[1] == 1 else gradient.mT).flatten(2).to(dtype).contiguous()


def differentiable(*tensors: Tensor) -> list[Tensor]:
    return [t.double().requires_grad_() for t in tensors]


@pytest.mark.parametrize(("case", "precision"), with_precisions([(case,) for case in FIRST], both={0, 3}))
def test_first_stage(case: tuple[int, ...], precision: str, device: torch.device) -> None:
    clients, batch, height, width, channels, out, kernel, padding, groups, last = case
    stage = first_stage.prepared(Stage(height, width, channels, out, kernel, padding, groups))
    size = out * channels * kernel**2
    rows = 0.3 * torch.randn(clients, size + out, device=device)
    norm = torch.rand(clients, 2, out, device=device) + 0.2
    share, zeta = shares(clients, batch, device), torch.rand(clients, device=device)
    images = torch.randn(clients, batch, height, width, channels, device=device).to(STORAGE[precision])
    x = first_stage.prepare(images, padding, STORAGE[precision])
    border = (0, 0, *(padding,) * 4)
    assert torch.equal(x[..., :channels], torch.nn.functional.pad(images, border))
    assert torch.equal(x[..., -1], torch.ones_like(x[..., 0]))
    dpool = torch.randn(clients, batch, *(n // 2 for n in stage.map), out, device=device)

    rows64, norm64 = differentiable(rows, norm)
    w64 = rows64[:, :size].view(clients, out, channels, kernel, kernel)
    z64 = reference.convolution(images.double(), w64, rows64[:, size:], padding)
    pool64, man64 = reference.activation(z64, share.double(), groups, norm64.unbind(1) if groups else None)
    objective = (dpool * pool64).sum() + (zeta * man64).sum()
    gradients = torch.autograd.grad(objective, (rows64, norm64), allow_unused=True)

    packed = conv.pack(rows, stage, precision)
    affine = norm.unbind(1) if groups else None
    man = torch.full((clients, 64), torch.nan, device=device)
    stats = grams = None
    if affine:
        grams = gram.matrices(stage, x, precision)
        stats = gram.statistics(stage, packed, affine, grams)
    strides = pooled_strides(stage, last)
    pooled, arg = first_stage.forward(stage, x, packed, share, stats, man, strides, precision)
    assert relative(pooled_view(pooled, stage, strides), pool64.flatten(2, 3)) < TOLERANCE[precision]
    parts = first_stage.parts(stage, batch, precision)
    assert relative(man[:, :parts].sum(1), man64) < TOLERANCE[precision]
    d = as_stored(dpool, strides, x.dtype)
    part = first_stage.backward(stage, x, packed, share, stats, d, arg, zeta, strides, precision)
    if affine:
        part, npart = gram.gradient(stage, packed, affine, stats, grams, part, precision)
        assert relative(npart.sum(1), gradients[1]) < 3 * TOLERANCE[precision]
    grad = torch.full_like(rows, torch.nan)
    conv.unpack(part, grad, stage)
    assert relative(grad, gradients[0]) < 3 * TOLERANCE[precision]


@pytest.mark.parametrize(("case", "precision"), with_precisions([(case,) for case in STORED], both={0, 3, 4, 5}))
def test_stored_map(case: tuple[int, ...], precision: str, device: torch.device) -> None:
    clients, batch, height, width, out, groups, last = case
    stage = Stage(height, width, out, out, 1, 0, groups)
    z = (torch.randn(clients, batch, height, width, out, device=device) + 0.3).to(STORAGE[precision])
    norm = torch.rand(clients, 2, out, device=device) + 0.2
    norm[:, 0, 0], norm[:, 0, 1] = 0.0, -0.5  # γ of a channel that GroupNorm makes flat, and of one that it turns round
    share, zeta = shares(clients, batch, device), torch.rand(clients, 2, device=device)[:, 1]
    dpool = torch.randn(clients, batch, height // 2, width // 2, out, device=device).to(z.dtype)

    z64, norm64 = differentiable(z, norm)
    pool64, man64 = reference.activation(z64, share.double(), groups, norm64.unbind(1) if groups else None)
    objective = (dpool * pool64).sum() + (zeta * man64).sum()
    dz64, dnorm64 = torch.autograd.grad(objective, (z64, norm64), allow_unused=True)

    affine = norm.unbind(1) if groups else None
    man = torch.full((clients, 256), torch.nan, device=device)
    strides = pooled_strides(stage, last)
    pooled, arg, stats = activation.forward(stage, z, affine, share, man, strides)
    assert relative(pooled_view(pooled, stage, strides), pool64.flatten(2, 3)) < TOLERANCE[precision]
    parts = activation.parts(stage, batch)
    assert relative(man[:, :parts].sum(1), man64) < TOLERANCE[precision]
    dz, bpart, npart = activation.backward(
        stage, z, affine, share, pooled, as_stored(dpool, strides, z.dtype), arg, stats, zeta, strides
    )
    assert relative(dz, dz64) < TOLERANCE[precision]
    difference = bpart.sum(1) - dz64.sum((1, 2, 3))  # nearly zero by itself under GroupNorm
    assert difference.norm() < TOLERANCE[precision] * dz64.abs().sum((1, 2, 3)).norm()
    if groups:
        assert relative(npart.sum(1), dnorm64) < TOLERANCE[precision]


def test_equal_maxima_take_the_first(device: torch.device) -> None:
    """A flat patch of an image gives equal values in a window: the first in reading order gets the gradient."""
    stage = Stage(4, 4, 16, 16, 1, 0)
    z = torch.full((1, 1, 4, 4, 16), 2.0, device=device)
    z[:, :, 2:, 2:] = -1.0  # a window without a positive value: no gradient at all
    share, zeta = torch.ones(1, 1, device=device), torch.zeros(1, device=device)
    man = torch.empty(1, 8, device=device)
    pooled, arg, stats = activation.forward(stage, z, None, share, man, (16, 1))
    dz, _, _ = activation.backward(stage, z, None, share, pooled, torch.ones_like(pooled), arg, stats, zeta, (16, 1))
    expected = torch.zeros(4, 4, device=device)
    expected[0, 0] = expected[0, 2] = expected[2, 0] = 1.0
    assert torch.equal(dz[0, 0, :, :, 3], expected)


def test_nan_is_propagated(device: torch.device) -> None:
    """Through ReLU and pooling, so that a diverged client shows in its loss."""
    stage = Stage(2, 2, 16, 16, 1, 0)
    z = torch.zeros(1, 1, 2, 2, 16, device=device)
    z[0, 0, 1, 0, 5] = torch.nan
    man = torch.empty(1, 8, device=device)
    pooled, _, _ = activation.forward(stage, z, None, torch.ones(1, 1, device=device), man, (16, 1))
    assert pooled.isnan().nonzero().tolist() == [[0, 0, 5]]
    assert man[0, 0].isnan()
