"""Stacked convolution against `reference.convolution` and its autograd."""

from __future__ import annotations

import pytest
import torch

from fedman.kernels import conv
from fedman.kernels.stage import STORAGE, Stage
from tests.kernels import kernel_reference as reference
from tests.kernels.kernel_checks import TOLERANCE, relative, with_precisions

# clients, batch, stage: odd maps, batches that leave tiles partly empty, padding, several channel blocks, strides,
# numbers of channels that leave blocks partly empty
CASES = [
    (1, 1, Stage(6, 6, 16, 16, 5, 0)),
    (2, 7, Stage(5, 6, 16, 32, 3, 0)),
    (2, 12, Stage(3, 4, 32, 16, 3, 1)),
    (1, 2, Stage(3, 2, 128, 128, 1, 0)),
    (1, 1, Stage(4, 3, 16, 16, 3, 2)),
    (2, 3, Stage(6, 5, 16, 16, 3, 1, stride=2)),
    (1, 2, Stage(5, 7, 3, 20, 5, 2, stride=2)),
    (2, 2, Stage(4, 5, 16, 16, 1, 0, stride=2)),
    (1, 2, Stage(9, 8, 24, 70, 3, 1, stride=3)),
    (1, 1, Stage(5, 6, 3, 5, 7, 3)),
]


def problem(clients: int, batch: int, stage: Stage, device: torch.device, precision: str) -> tuple[torch.Tensor, ...]:
    dtype = STORAGE[precision]
    x = torch.randn(clients, batch, stage.height, stage.width, stage.channels, device=device).to(dtype)
    dz = torch.randn(clients, batch, *stage.map, stage.out, device=device).to(dtype)
    size = stage.out * stage.channels * stage.kernel**2
    rows = torch.randn(clients, size + stage.out + 3, device=device)  # three more, as if layers followed
    return x, rows, dz


@pytest.mark.parametrize(("clients", "batch", "stage", "precision"), with_precisions(CASES, both={2, 3, 5, 8}))
def test_equals_reference(clients: int, batch: int, stage: Stage, precision: str, device: torch.device) -> None:
    x, rows, dz = problem(clients, batch, stage, device, precision)
    shape = torch.Size((clients, stage.out, stage.channels, stage.kernel, stage.kernel))
    size = shape[1:].numel()
    x64 = x.double().requires_grad_()
    w64 = rows[:, :size].double().view(shape).requires_grad_()
    bias = rows[:, size : size + stage.out]
    z64 = reference.convolution(x64, w64, bias.double(), stage.padding, stage.stride)
    dx64, dw64 = torch.autograd.grad(z64, (x64, w64), dz.double())

    packed = conv.pack(rows, stage, precision)
    z = conv.forward(stage, x, packed, rows[:, size:], precision)
    dx = conv.input_gradient(stage, dz, packed, precision)
    parts = conv.weight_gradient(stage, x, dz, precision)
    dw = parts.sum(1).unflatten(2, (stage.kernel, stage.kernel, -1)).permute(0, 1, 4, 2, 3)

    assert relative(z, z64) < TOLERANCE[precision]
    assert relative(dx, dx64) < TOLERANCE[precision]
    assert relative(dw, dw64) < TOLERANCE[precision]
    if stage.channels % 16 == 0:
        out = torch.full_like(rows, torch.nan)
        conv.unpack(parts, out, stage)
        assert relative(out[:, :size], dw64.flatten(1)) < TOLERANCE[precision]
        assert out[:, size:].isnan().all()  # nothing written beyond the weights


@pytest.mark.parametrize("splits", [1, 3, 12])
def test_split_sums(splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of pixel ranges, also more than there are tiles, gives the same gradient, the same bits each time."""
    stage = Stage(6, 6, 16, 16, 2, 1)
    x, _, dz = problem(1, 5, stage, device, "fp32")
    options = {"BK": 32, "BC": 16, "BO": 16, "SPLITS": splits, "num_warps": 4, "num_stages": 2}
    expected = conv.weight_gradient(stage, x, dz, "fp32").sum(1)
    monkeypatch.setattr(conv, "_weight_options", lambda *_: dict(options))
    parts = conv.weight_gradient(stage, x, dz, "fp32")
    assert parts.shape[1] == splits
    assert relative(parts.sum(1), expected) < TOLERANCE["fp32"]
    assert torch.equal(parts, conv.weight_gradient(stage, x, dz, "fp32"))


def test_pack_of_pairs(device: torch.device) -> None:
    """The first stage's weights: twice in a patch of k × (k + 1) pixels, one pixel apart; `unpack` adds both."""
    stage = Stage(8, 8, 4, 16, 3, 0, image=3)  # three image channels and the ones
    rows = torch.randn(2, 16 * 27 + 16, device=device)
    packed = conv.pack(rows, stage, "fp32")
    assert packed.shape == (2, 2, 16, 64)
    taps = packed[..., :48].unflatten(-1, (3, 4, 4))
    expected = rows[:, : 16 * 27].view(2, 16, 3, 3, 3).permute(0, 1, 3, 4, 2)
    for right in (0, 1):
        assert torch.equal(taps[:, right, :, :, right : right + 3, :3], expected)
        assert torch.equal(taps[:, right, :, 1, right + 1, 3], rows[:, 16 * 27 :])
    assert packed.count_nonzero() == 2 * rows.count_nonzero()
    back = torch.full_like(rows, torch.nan)
    conv.unpack(torch.cat([packed, 2 * packed], 1), back, stage)
    torch.testing.assert_close(back, 6 * rows)
