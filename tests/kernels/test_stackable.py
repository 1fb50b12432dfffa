"""A model of any kind stacked by vmap, its operations replaced, against the plain module for every row."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedman.execution import stackable
from fedman.execution.base import Batch
from fedman.execution.branches import Stack
from fedman.execution.compiled import trace
from fedman.execution.one_by_one import OneByOne
from fedman.execution.vmapped import Vmapped
from fedman.models.parameters import flatten, flatten_buffers
from fedman.models.resnet import Norm, Residual, group_norm
from fedman.penalties import MAN
from fedman.tasks import Classification
from tests.kernels.kernel_checks import relative

CLASSES = 4


class Functional(nn.Module):
    """Convolutions of all forms that the kernels serve, called as functions."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(0.3 * torch.randn(5, 3, 3, 3))
        self.b = nn.Parameter(0.3 * torch.randn(6, 5, 3, 3))
        self.c = nn.Parameter(0.3 * torch.randn(CLASSES, 6, 2, 2))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x):
        x = torch.conv2d(x, self.a, None, 1, "same").relu()
        x = F.conv2d(x, self.b, self.bias, (2, 2), padding=(1, 1)).relu()
        return F.conv2d(input=x, weight=self.c, stride=2).mean((2, 3))


def residual(norm: Norm) -> nn.Module:
    """Four convolutions, with strides and a shortcut."""
    stem = nn.Conv2d(3, 4, 3, padding=1, bias=False), norm(4), nn.ReLU()
    return nn.Sequential(*stem, Residual(4, 8, 2, norm), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(8, CLASSES))


class Attending(nn.Module):
    """Attention with the batch or the sequence first, without a mask and with one; linear layers over a sequence."""

    def __init__(self):
        super().__init__()
        self.first = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)
        self.second = nn.MultiheadAttention(8, 2)
        self.third = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.first(x.flatten(1).unflatten(1, (-1, 8))).transpose(0, 1)
        x = self.second(x, x, x, need_weights=False)[0].transpose(0, 1)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = self.third(x, x, x, attn_mask=hidden, need_weights=False)[0]
        return self.head(x).mean(1)


KINDS = {
    "functional": Functional,
    "residual": lambda: residual(group_norm),
    "batch-norm": lambda: residual(nn.BatchNorm2d),
    "attention": Attending,
    "others": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6, affine=False), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=3), nn.Flatten(),
        nn.Linear(96, CLASSES),
    ),
}  # fmt: skip


def case(kind, device):
    model = KINDS[kind]()
    w = flatten(model)
    W = (w + 0.1 * torch.randn(2, len(w))).to(device)
    buffers = flatten_buffers(model).repeat(2, 1).to(device)
    x, y = torch.randn(2, 3, 3, 8, 8, device=device), torch.randint(0, CLASSES, (2, 3), device=device)
    return model, W, Batch(x, y, buffers=buffers)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(stackable, "applies", lambda W: True)
    monkeypatch.setattr(stackable, "_has_kernels", lambda x: x.dtype != torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_plain_module(kind, device):
    model, W, batch = case(kind, device)
    stacked = Vmapped(model, Classification(), MAN(), "fp32")
    exact = batch._replace(x=batch.x.double(), buffers=batch.buffers.double())
    expected = OneByOne(model.double(), Classification(), MAN(), "fp64").gradient(W.double(), exact, 0.2)
    for a, b in zip(stacked.gradient(W, batch, 0.2), expected, strict=True):
        assert relative(a, b) < 1e-5
    assert stacked.slow == ("conv2d" if kind == "others" else "")


@pytest.mark.slow
def test_the_compiler_sees_one_operation_for_all_models(device):
    model, W, batch = case("residual", device)
    stacked = Vmapped(model, Classification(), MAN(), "fp32")
    expected = stacked.gradient(W, batch, 0.0)  # brings constants to the device
    graph = trace(lambda W, x, y: stacked.gradient(W, Batch(x, y), 0.0), [W, batch.x, batch.y])
    called = [str(node.target) for node in graph.graph.nodes]
    assert called.count("fedman.conv_forward.default") == called.count("fedman.conv_weight_gradient.default") == 4
    assert called.count("fedman.conv_input_gradient.default") == 4 - 1  # not of the images
    for a, b in zip(graph(W, batch.x, batch.y), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_layout_the_kernels_cannot_read(device):
    x, packed = torch.randn(2, 3, 8, 8, 4, device=device), torch.randn(2, 4, 36, device=device)
    with pytest.raises(ValueError, match="must be contiguous"):
        torch.ops.fedman.conv_forward(x.transpose(2, 3), packed, 3, 1, 1, "fp32")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("norm", [group_norm, nn.BatchNorm2d])
def test_compiled_blocks_are_the_plain_module(norm, monkeypatch):
    """At sizes and in layouts of a ResNet-18: two blocks of its first stage and one of its second."""
    monkeypatch.setattr(Stack, "sizes", (2, 1))
    stem = nn.Conv2d(3, 64, 3, padding=1, bias=False), norm(64), nn.ReLU()
    blocks = (Residual(c, o, stride, norm) for c, o, stride in ((64, 64, 1), (64, 64, 1), (64, 128, 2)))
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))
    w = flatten(model)
    W = (w + 0.1 * w.std() * torch.randn(3, len(w))).cuda()
    x, y = torch.randn(3, 10, 3, 16, 16, device="cuda"), torch.randint(0, CLASSES, (3, 10), device="cuda")
    batch = Batch(x, y, buffers=flatten_buffers(model).repeat(3, 1).cuda())
    stacked = Stack(model, Classification(), MAN(), "fp32", compiled=True)
    found = stacked.gradient(W, batch, 0.2)
    assert stacked.title == "compiled vmap"
    exact = batch._replace(x=x.double(), buffers=batch.buffers.double())
    expected = OneByOne(model.double(), Classification(), MAN(), "fp64").gradient(W.double(), exact, 0.2)
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 1e-4


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3)])
def test_cross_entropy_is_pytorchs(shape, reduction, device):
    x = torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 4, (6, *shape[2:]), device=device)
    y[1] = -100
    found = []
    for mode in (stackable.StackableOperations(), torch.no_grad()):
        with mode, torch.enable_grad():
            loss = F.cross_entropy(x, y, reduction=reduction)
        found.append((loss.detach(), *torch.autograd.grad(loss.sum(), x)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kept", [(), (1, 4)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("shape", [(5, 6, 4), (5, 6, 4, 3)])
def test_cross_entropy_on_a_cpu_has_the_bits_of_pytorchs(shape, reduction, kept):
    x, y = torch.randn(shape), torch.randint(0, shape[2], (*shape[:2], *shape[3:]))
    y[:, list(kept)] = -1
    found = []
    for mode in (stackable.StackableOnCPU(), torch.enable_grad()):
        each = x.clone().requires_grad_()
        with mode:
            loss = torch.vmap(lambda a, b: F.cross_entropy(a, b, ignore_index=-1, reduction=reduction))(each, y)
        found.append((loss.detach(), *torch.autograd.grad(loss.sum(), each)))
    assert all(map(torch.equal, *found))


def test_stacked_models_on_a_cpu_do_without_sympy():
    code = """if True:
        import sys
        import torch
        from fedman.execution.base import Batch
        from fedman.execution.vmapped import Vmapped
        from fedman.penalties import MAN
        from fedman.tasks import Classification

        x, y, W = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64), torch.randn(2, 25)
        Vmapped(torch.nn.Linear(4, 5), Classification(), MAN()).gradient(W, Batch(x, y), 0.0)
        assert 'sympy' not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)
