"""The stacked model against the module itself, run client by client in float64."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from fedman.kernels.convnet import StackedConvNet
from fedman.models.convnet import ConvNet, cifar_cnn, small_cnn, tiny_cnn
from fedman.penalties.measures import mean_square, mean_square_and_variance
from tests.kernels import kernel_reference as reference
from tests.kernels.kernel_checks import GRADIENT, LATER, PRECISIONS, TOLERANCE, relative, with_precisions

# clients, batch, image shape, classes, model: the paper's two forms in small, odd maps, one stage
TINY = {"channels": (16, 16), "kernel": 3, "padding": 1, "groups": 2, "hidden": (20, 12)}
CIFAR = {"channels": (16, 32), "kernel": 5, "hidden": (24, 20)}
CASES = {
    "cifar": (1, 2, (3, 16, 16), 10, CIFAR),
    "cifar, two clients": (2, 2, (3, 16, 16), 10, CIFAR),
    "tiny": (1, 2, (3, 8, 8), 7, TINY),
    "tiny, two clients": (2, 2, (3, 8, 8), 7, TINY),
    "tiny, batch 5": (2, 5, (3, 8, 8), 7, TINY),
    "tiny, one stage": (2, 5, (3, 8, 8), 7, {**TINY, "channels": (16,), "groups": 0}),
    "odd": (1, 2, (1, 12, 13), 3, {"channels": (16, 16), "kernel": 3, "hidden": (8,)}),
    "one stage, batch 50": (1, 50, (1, 5, 5), 2, {"channels": (16,), "kernel": 3, "hidden": ()}),
    "small": (3, 3, (1, 6, 6), 2, {"channels": (16, 16), "kernel": 3, "padding": 1, "hidden": (5,)}),
    "small, one stage": (3, 3, (1, 6, 6), 2, {"channels": (16,), "kernel": 3, "padding": 1, "hidden": (5,)}),
}
WEIGHTED = [("cifar", True), ("tiny", True), ("odd", False), ("one stage, batch 50", False)]


def problem(name: str, device: torch.device) -> tuple[ConvNet, tuple[int, int, int], Tensor, Tensor, Tensor]:
    clients, batch, shape, classes, options = CASES[name]
    model = ConvNet(shape, classes, **options).to(device)
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    W = start + 0.05 * torch.randn(clients, start.numel(), device=device)
    x = torch.randn(clients, batch, *shape[1:], shape[0], device=device)
    return model, shape, W, x, torch.randint(classes, (clients, batch), device=device)


@pytest.mark.parametrize(
    ("name", "weighted", "precision"),
    [
        *with_precisions(WEIGHTED, both={2, 3}),
        *(
            pytest.param(f"{name}, two clients", True, precision, marks=LATER)
            for name in ("cifar", "tiny")
            for precision in PRECISIONS
        ),
    ],
)
def test_losses_and_gradient(name: str, weighted: bool, precision: str, device: torch.device) -> None:
    model, shape, W, x, y = problem(name, device)
    weight = (torch.rand(y.shape, device=device) < 0.7).float() if weighted else None
    if weight is not None:
        weight[:, 0] = 1.0
    zeta = torch.rand(len(W), device=device)
    W64 = W.double().requires_grad_()
    expected = reference.losses(model.double(), W64, x.double(), y, None if weight is None else weight.double())
    ce64, man64 = expected
    (grad64,) = torch.autograd.grad((ce64 + zeta * man64.sum(1)).sum(), W64)

    net = StackedConvNet(model, shape, precision)
    x = net.prepare(x)
    *losses, grad = net.gradient(W, x, y, zeta[:, None], weight)
    assert all(map(torch.equal, losses, net.losses(W, x, y, weight)))
    assert grad.dtype == torch.float32
    for value, reference64 in zip(losses, expected, strict=True):
        assert relative(value, reference64) < 5 * TOLERANCE[precision]
    assert relative(grad, grad64) < GRADIENT[precision]
    if precision == "fp32":
        sizes = [p.numel() for p in model.parameters()]
        for piece, piece64 in zip(grad.split(sizes, 1), grad64.split(sizes, 1), strict=True):
            assert relative(piece, piece64) < 2e-5  # each parameter by itself


@pytest.mark.parametrize("real", [None, (5, 3), (1, 2)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tiny, one stage", pytest.param("tiny, batch 5", marks=LATER)])
def test_variance_over_the_batch(name: str, precision: str, real: tuple[int, int] | None, device: torch.device) -> None:
    """The authors' Tiny-ImageNet term: some layers do not count, one counts with its variance over the `real` samples
    of each client, which are all without padding."""
    model, shape, W, x, y = problem(name, device)
    last = len(model.relus) - 1
    zeta = torch.rand(2, 1, device=device) * torch.tensor([1.0] * (last + 1) + [0], device=device)
    W64 = W.double().requires_grad_()
    layers = {f"relus.{i}": mean_square_and_variance if i == last else mean_square for i in range(last + 1)}
    weight = None if real is None else (torch.arange(5) < torch.tensor(real)[:, None]).float().to(device)
    share = None if weight is None else weight.double()
    ce64, man64 = reference.losses(model.double(), W64, x.double(), y, share, layers=layers)
    (grad64,) = torch.autograd.grad((ce64 + (zeta * man64).sum(1)).sum(), W64)
    net = StackedConvNet(model, shape, precision, variance_of=[last])
    ce, man, grad = net.gradient(W, net.prepare(x), y, zeta, weight)
    for value, reference64 in zip((ce, man), (ce64, man64), strict=True):
        assert relative(value, reference64) < 5 * TOLERANCE[precision]
    assert relative(grad, grad64) < GRADIENT[precision]
    assert StackedConvNet.supports(model, shape, [last])
    assert not StackedConvNet.supports(model, shape, [0])


@pytest.mark.slow
def test_same_bits_again_and_for_a_client_alone(device: torch.device) -> None:
    """The same bits on a second run, and for images with their Gram matrices; nearly the same for a client alone."""
    model, shape, W, x, y = problem("small", device)
    net = StackedConvNet(model, shape, "bf16")
    x, zeta = net.prepare(x), torch.tensor(0.15, device=device)
    everyone = net.gradient(W, x, y, zeta)
    assert all(map(torch.equal, everyone, net.gradient(W, net.images(x), y, zeta)))
    for value, alone in zip(everyone, net.gradient(W[1:2], x[1:2], y[1:2], zeta), strict=True):
        torch.testing.assert_close(value[1:2], alone, rtol=1e-5, atol=1e-6)


def test_client_without_samples(device: torch.device) -> None:
    """All weights zero (an empty place in a chunk): loss zero and gradient zero, other clients unchanged."""
    model, shape, W, x, y = problem("small, one stage", device)
    net = StackedConvNet(model, shape, "fp32")
    weight = torch.ones(y.shape, device=device)
    weight[1] = 0.0
    ce, man, grad = net.gradient(W, net.prepare(x), y, torch.ones(1, device=device), weight)
    assert not torch.cat([ce[1:2], man[1], grad[1]]).any()
    assert grad[0].any()
    assert grad[2].any()


def test_supported_models() -> None:
    assert StackedConvNet.supports(cifar_cnn((3, 32, 32), 100), (3, 32, 32))
    assert StackedConvNet.supports(tiny_cnn((3, 64, 64), 200), (3, 64, 64))
    assert StackedConvNet.supports(small_cnn((1, 8, 8), 10), (1, 8, 8))
    assert not StackedConvNet.supports(ConvNet((3, 32, 32), 10, channels=(24, 64)), (3, 32, 32))
    assert not StackedConvNet.supports(ConvNet((3, 32, 32), 10, channels=()), (3, 32, 32))
    assert not StackedConvNet.supports(ConvNet((12, 32, 32), 10), (12, 32, 32))
    assert not StackedConvNet.supports(ConvNet((3, 32, 32), 10, padding=5), (3, 32, 32))
    assert not StackedConvNet.supports(ConvNet((3, 32, 31), 10, groups=4), (3, 32, 31))


def test_import_needs_no_triton() -> None:
    """On a machine without Triton the package imports, and says that the kernels are not available."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, fedman.kernels as k\n"
        "assert not k.available(torch.device('cpu')) and not k.available(torch.device('meta'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
