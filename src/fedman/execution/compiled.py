"""A function of tensors, gradients inside it and all, compiled into one graph of kernels.

The function is traced once, with tensors that have shapes and no values, down to PyTorch's basic operations. Hooks,
autograd functions and other Python are then gone; what depends on a value (`if x.mean() > 0`) cannot be traced and is
an error. What inductor makes of the graph is kept in fedman's cache folder for the next run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedman.data.catalog import default_dir

Function = Callable[..., tuple[Tensor, ...]]

ON_GPU: dict[str, Any] = {
    "combo_kernels": True,  # many small casts in one launch
    "combo_kernels_pointwise_only": True,
}
"""Inductor's settings on a GPU; `benchmarks/models.py --inductor` compares others."""


def compile_graph(function: Function, example: Sequence[Tensor]) -> Function:
    """`function` for tensors with the shapes of `example`, compiled."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_dir() / "compiled"))
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    graph = trace(function, example)
    _share_operands()
    _take_whole_numbers()
    settings: dict[str, Any] = {"constant_and_index_propagation": not _has_large_numbers(graph)}
    if any(v.is_cuda for v in example):
        settings |= ON_GPU
    if torch.are_deterministic_algorithms_enabled():
        settings["deterministic"] = True  # sums are ordered by rule and not by stopwatch
        settings |= _without_fused_multiply_adds()
    fake = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)  # without one inductor keeps nothing
    with config.patch(settings), _channels_last_convolutions(), tracing(TracingContext(fake)), torch.no_grad():
        compiled: Any = compile_fx(graph, list(example))

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(compiled(*tensors))

    return call


def trace(function: Function, example: Sequence[Tensor]) -> torch.fx.GraphModule:
    """`function` as a graph of basic operations on tensors with the shapes of `example`."""
    from torch._export.utils import _compiling_state_context
    from torch.fx.experimental.proxy_tensor import make_fx

    with _compiling_state_context(), torch.enable_grad():  # torch.compiler.is_compiling() is true in it
        graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*example)
    bring_numbers(graph)
    return graph


def bring_numbers(graph: torch.fx.GraphModule) -> None:
    """Numbers that are written into tensors on a GPU (`a[:, 0] = 1`), traced as tensors on the host, are moved there: a
    captured CUDA graph cannot copy from the host."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.lift_fresh_copy.default and node.args[0].op == "get_attr":
            number, users = getattr(graph, node.args[0].target), (user.meta.get("val") for user in node.users)
            into = {v.device for v in users if isinstance(v, Tensor)}
            if not number.ndim and len(into) == 1:
                setattr(graph, node.args[0].target, number.to(into.pop()))


def _has_large_numbers(graph: torch.fx.GraphModule) -> bool:
    """Whether numbers beyond 32 bits occur, as in the hash behind dropout: inductor takes indices to be smaller."""
    return any(isinstance(v, int) and abs(v) >= 2**31 for node in graph.graph.nodes for v in node.args)


def _take_whole_numbers() -> None:
    """Inductor's variance counts its entries in sympy's numbers (PyTorch 2.11 to 2.13). Where constants are not
    propagated, a loop refuses them: a model with both a norm and dropout would not be compiled."""
    from sympy import Integer
    from torch._inductor.loop_body import CaptureIndexing

    def constant(self: Any, value: Any, dtype: torch.dtype) -> Any:
        return self._default("constant", (int(value) if isinstance(value, Integer) else value, dtype), {})

    CaptureIndexing.constant = constant  # type: ignore[method-assign]


def _without_fused_multiply_adds() -> dict[str, Any]:
    """Settings with which a pointwise kernel has the same bits whatever its tiles.

    Inductor chooses tiles by stopwatch, and with them what the entries of a thread have in common. On that depends
    which products the compiler fuses with a sum, without rounding between. `emulate_precision_casts` forbids it. It
    also rounds to bf16 between operations in bf16, which is not wanted here (Triton 3.6 fails at some of these casts).
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class KeepFloat32(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.nodes:
                node.meta.pop("low_precision_pointwise_barrier", None)

        def uuid(self) -> str:
            return "fedman: float32 between operations in bf16"

    return {"emulate_precision_casts": True, "post_grad_custom_pre_pass": KeepFloat32()}


def _share_operands() -> None:
    """Our convolutions read the same contiguous tensors: inductor would write a copy of a tensor for each of them."""
    from torch._inductor import ir, lowering

    def shared(node: Any, *args: Any, **kwargs: Any) -> Any:
        for v in args:
            if isinstance(v, ir.TensorBox):
                v.realize()
        return tuple(ir.ExternKernel.require_contiguous(v) if isinstance(v, ir.TensorBox) else v for v in args), kwargs

    for name in ("conv_forward", "conv_input_gradient", "conv_weight_gradient"):
        operation = getattr(torch.ops.fedman, name, None)
        if operation is not None and operation.default not in lowering.lowerings:
            lowering.make_fallback(operation.default, layout_constraint=shared)


@contextmanager
def _channels_last_convolutions() -> Iterator[None]:
    """Backward passes of 2-d convolutions on a GPU get their tensors with the channels last, as the forward passes do.

    Inductor gives them the order in which the graph was traced, which is channels first; every call of cuDNN would then
    begin and end with a transposition: 480 of the 2200 µs of a ResNet-18's gradient.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    backward, known = torch.ops.aten.convolution_backward.default, lowering._maybe_layout_constraints
    before = known.get(backward)

    def constrain(node: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None and not _on_gpu_2d(args):
            return before(node, *args, **kwargs)
        order = ir.NHWC_STRIDE_ORDER
        return (*(ir.ExternKernel.require_stride_order(v, order) for v in args[:3]), *args[3:]), kwargs

    def _on_gpu_2d(args: Sequence[Any]) -> bool:
        return V.graph.layout_opt and all(len(v.get_size()) == 4 and v.get_device().type == "cuda" for v in args[:3])

    known[backward] = constrain
    try:
        yield
    finally:
        if before is None:
            del known[backward]
        else:
            known[backward] = before
