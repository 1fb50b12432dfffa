"""One activation's tap against the direct formula: value, gradients of any order, layouts, precisions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck
from torch.func import jacfwd, jacrev, vmap

from fedman.penalties.autograd import tap


def direct(a: Tensor) -> Tensor:
    return a.reshape(*a.shape[:1], -1).square().sum(-1) / a.numel()


def activations() -> dict[str, Tensor]:
    image = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    return {
        "rows": torch.randn(3, 7, dtype=torch.float64),
        "image": image,
        "channels last": image.contiguous(memory_format=torch.channels_last),
        "transposed": image.permute(3, 1, 0, 2),
        "sliced": image[:, ::2, 1:, :],
        "expanded": torch.randn(3, 1, 4, dtype=torch.float64).expand(3, 5, 4),
        "volume": torch.randn(2, 3, 2, 2, 2, dtype=torch.float64),
        "one entry each": torch.randn(5, dtype=torch.float64),
        "number": torch.randn((), dtype=torch.float64),
    }


@pytest.mark.parametrize("layout", activations())
@pytest.mark.parametrize("relu", [False, True])
def test_value_and_gradient(layout: str, relu: bool) -> None:
    z = activations()[layout].requires_grad_()
    results = []
    for measure in (lambda a, z: tap(a, z), lambda a, _: (a, direct(a))):
        x = z * 1  # not a leaf, so that the fused ReLU can be used
        a = x.relu() if relu else x
        out, s = measure(a, x)
        assert torch.equal(out, a)
        slopes = torch.arange(s.numel(), dtype=torch.float64).reshape(s.shape) + 1
        results.append((s, *grad((out.sin().sum() + (slopes * s).sum()), z)))
    for ours, expected in zip(*results, strict=True):
        assert ours.stride() == expected.stride() or layout in ("sliced", "expanded", "transposed")
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("relu", [False, True])
def test_derivatives_of_any_order(relu: bool) -> None:
    """Backward, double backward and forward mode against finite differences."""
    z = torch.randn(3, 2, 2, dtype=torch.float64)
    z += z.sign() * 0.1  # away from the kink
    z.requires_grad_()

    def f(z: Tensor) -> tuple[Tensor, Tensor]:
        x = z * 1
        return tap(x.relu(), x) if relu else tap(x)

    assert gradcheck(f, z, check_forward_ad=True)
    assert gradgradcheck(f, z)
    assert gradgradcheck(lambda z: f(z)[1], z)


def test_forward_mode_of_recorded_activations() -> None:
    z = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    tangent = torch.randn_like(z)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(z, tangent) * 1
        for a in (x, x.relu()):
            for ours, expected in zip(tap(a, x), (a, direct(a)), strict=True):
                torch.testing.assert_close(forward_ad.unpack_dual(ours), forward_ad.unpack_dual(expected))


@pytest.mark.parametrize("relu", [False, True])
def test_batched_gradients(relu: bool) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True) * 1
    a = x.relu() if relu else x
    out, s = tap(a, x)
    v, w = torch.randn(5, 3, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    for outputs in ([(out, v), (s, w)], [(out, v)], [(s, w)]):
        tensors, vectors = zip(*outputs, strict=True)
        (batched,) = grad(tensors, x, vectors, retain_graph=True, is_grads_batched=True)
        each = [grad(tensors, x, [u[i] for u in vectors], retain_graph=True)[0] for i in range(5)]
        torch.testing.assert_close(batched, torch.stack(each))


def test_relu_and_tap_are_one_node_backward() -> None:
    x = torch.randn(3, 4, requires_grad=True) * 1
    out, _ = tap(x.relu(), x)
    assert out.grad_fn.next_functions[0][0] is x.grad_fn
    hidden, _ = tap(x.relu() * 2, x)  # not the ReLU of x: its own node stays
    assert hidden.grad_fn.next_functions[0][0].name() == "MulBackward0"
    other = x + 1
    shifted, _ = tap(other.relu(), x)
    assert shifted.grad_fn.next_functions[0][0].name() == "ReluBackward0"
    watched, seen = x.relu(), []
    watched.register_hook(seen.append)
    grad(tap(watched, x)[1].sum(), x, retain_graph=True)
    assert len(seen) == 1
    inplace = (x + 1).relu_()
    assert torch.equal(grad(tap(inplace, inplace)[1].sum(), x)[0], grad(direct((x + 1).relu()).sum(), x)[0])


def test_one_output_alone() -> None:
    """Without a gradient for s nothing is added; without one for a the rest is still right."""
    for relu in (False, True):
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True) * 1
        a = x.relu() if relu else x
        out, s = tap(a, x)
        assert torch.equal(grad(out.sin().sum(), x, retain_graph=True)[0], grad(a.sin().sum(), x)[0])
        torch.testing.assert_close(grad(s.sum(), x)[0], 2 * a.detach() / 12)


def test_nested_transforms() -> None:
    """The Hessian by forward over reverse mode, and per-sample gradients by vmap over any dimension."""
    z = torch.randn(3, 2, dtype=torch.float64)

    def f(z: Tensor, measure: object) -> Tensor:
        a = (z * 2).tanh()
        out, s = tap(a, z * 2) if measure is tap else (a, direct(a))
        return out.sin().sum() + s.sin().sum()

    for outer, inner in [(jacfwd, jacrev), (jacrev, jacrev), (jacrev, jacfwd)]:
        ours, expected = (outer(inner(f))(z, m) for m in (tap, None))
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    stack = torch.randn(3, 5, 2, dtype=torch.float64)
    for d in range(3):
        out, s = vmap(tap, in_dims=d)(stack)
        assert torch.equal(out, stack.movedim(d, 0))
        torch.testing.assert_close(s, torch.stack([direct(a) for a in stack.unbind(d)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    x = torch.full((2, 100), 200.0, dtype=dtype, requires_grad=True) * 1  # squares overflow in float16
    for a in (x, x.relu()):
        _, s = tap(a, x)
        assert s.dtype == torch.float32
        assert s.tolist() == [20_000.0, 20_000.0]
        (gradient,) = grad(a.sum() * 0 + tap(a, x)[0].sum() + s.sum() * 2e-3, x, retain_graph=True)
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), torch.full((2, 100), 1.004), rtol=1e-2, atol=0)


def test_a_scaled_loss_fits_float16() -> None:
    """The scale of mixed-precision training, times ζ, is beyond float16; times 2a/N it is not."""
    x = torch.full((2, 1000), 0.5, dtype=torch.float16, requires_grad=True) * 1
    out, s = tap(x.relu(), x)
    (gradient,) = grad(out.sum() * 0 + s.sum() * 2.0**17, x)
    torch.testing.assert_close(gradient.double(), torch.full((2, 1000), 2.0**17 / 2000), rtol=1e-3, atol=0)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
@settings(max_examples=30, deadline=None)
def test_any_shape_and_order_in_memory(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    a = torch.randn(shape, dtype=torch.float64).permute(*order).requires_grad_()
    out, s = tap(a)
    torch.testing.assert_close(s, direct(a), rtol=1e-12, atol=1e-14)
    (ours,) = grad((out * a.detach()).sum() + s.sum(), a)
    torch.testing.assert_close(ours, a * (1 + 2 / a.numel()), rtol=1e-12, atol=1e-14)


def test_an_empty_batch_counts_nothing() -> None:
    x = torch.zeros(0, 3, requires_grad=True) * 1
    for a in (x, x.relu()):
        out, s = tap(a, x)
        assert s.shape == (0,)
        assert grad(out.sum() + s.sum(), x, retain_graph=True)[0].shape == (0, 3)


def test_gpu_rows() -> None:
    """Which tensors the GPU kernels may read as rows does not depend on there being a GPU."""
    from fedman.penalties.autograd import _in_rows

    image = torch.randn(3, 4, 5, 6)
    last = nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last)(image).detach()
    assert _in_rows(image, 1)
    assert _in_rows(image, 2)
    assert _in_rows(last, 1)
    assert not _in_rows(last, 2)
    assert not _in_rows(image.transpose(0, 1), 1)
    assert not _in_rows(image[:0], 1)
