"""Matrices of a model's mean loss as linear operators, known by their products with vectors; the Hessian first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedman.errors import UserError
from fedman.execution.device import matmul_precision
from fedman.flatness.convolution import Convolutions
from fedman.flatness.data import Batches, Loss, call, require_mean
from fedman.flatness.weight_norm import WeightNorms
from fedman.models.parameters import ParameterLayout, copy_of

Graph = TypeVar("Graph")
Progress = Callable[[int, int], None]  # called with how much is done, and of how much at most


class Operator(Protocol):
    """A symmetric matrix `[P, P]`, known by its products."""

    size: int
    dtype: torch.dtype
    device: torch.device

    def __call__(self, vectors: Tensor) -> Tensor:
        """Hv of every row v of `[k, P]`."""
        ...


class Curvature(ABC, Generic[Graph]):
    """A symmetric matrix `[P, P]` of derivatives of a model's mean loss: what `Hessian` and `GaussNewton` share.

    A product is a sum over batches with their shares n_b/n of all n samples. The graph of a batch is built once and
    serves all rows of `[k, P]`; `keep_graphs` also keeps it between calls, which saves a third or more of a single
    product's time if the activations of all samples fit in memory. By default graphs are kept on CUDA if they take at
    most half of the free memory.

    The model is copied and put in eval mode; the caller's model does not change. `parameters` selects a diagonal block
    by names of parameters or modules, or by patterns such as `*.bias`; a vector holds their entries in the order of
    `model.parameters()`. Products are computed in `dtype`, float32 or float64; `tf32` allows TF32 on CUDA, which is
    faster and accurate to three digits. `products` counts the vectors multiplied so far.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Any,
        *,
        parameters: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
        batch_size: int | None = None,
        limit: int | None = None,
        resident: bool = True,
        keep_graphs: bool | None = None,
        tf32: bool = False,
    ) -> None:
        self.dtype = check_dtype(dtype)
        self.layout = select(model, parameters)
        self.device = next(model.parameters()).device
        self.loss = loss
        self.model = copy_of(model).to(dtype).eval()
        self.size = self.layout.size  # P, the number of parameters in the block
        for name, p in self.model.named_parameters():
            p.requires_grad_(name in self.layout.names)
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        self.batches = Batches(
            batches, device=self.device, dtype=dtype, batch_size=batch_size, limit=limit, resident=resident
        )
        with arithmetic(tf32):
            require_mean(self.model, loss, self.batches)
        self.samples = self.batches.samples  # n
        self.products = 0
        self.tf32 = tf32
        self._keep = keep_graphs if self.device.type == "cuda" else bool(keep_graphs)  # None: not known yet
        self._graphs: list[tuple[float, Graph]] = []

    @abstractmethod
    def _build(self, x: Any, y: Any) -> Graph:
        """What the products of a batch need."""

    @abstractmethod
    def _product(self, graph: Graph, row: Sequence[Tensor]) -> Sequence[Tensor]:
        """The product of a batch's matrix with a vector; both in the shapes of the weights."""

    def __call__(self, vectors: Tensor) -> Tensor:
        """Hv of every row v of `[k, P]`."""
        if vectors.ndim != 2 or vectors.shape[1] != self.size:
            raise UserError(f"vectors: of shape {tuple(vectors.shape)}, [k, {self.size}] is needed")
        rows = [list(self.layout.unflatten(v).values()) for v in vectors.to(self.device, self.dtype)]
        total = torch.zeros(len(rows), self.size, dtype=self.dtype, device=self.device)
        for share, graph in self._each_batch():
            for out, row in zip(total, rows, strict=True):
                with arithmetic(self.tf32):
                    product = self._product(graph, row)
                out.add_(torch.cat([t.flatten() for t in product]), alpha=share)
            del graph
        self.products += len(rows)
        return finite(total, "product with a vector")

    def dense(self) -> Tensor:
        """The matrix `[P, P]`, for small blocks: P products."""
        return self(torch.eye(self.size, dtype=self.dtype, device=self.device))

    def _each_batch(self) -> Iterator[tuple[float, Graph]]:
        """Each batch's share and graph."""
        if len(self._graphs) == len(self.batches):
            yield from self._graphs
            return
        self._graphs.clear()
        before = _allocated(self.device)
        for share, x, y in self.batches:
            with arithmetic(self.tf32), _twice_differentiable(), torch.enable_grad():
                graph = self._build(x, y)
            if self._keep is None:
                needed = (_allocated(self.device) - before) * len(self.batches)
                self._keep = needed <= _free(self.device) / 2
            if self._keep:
                self._graphs.append((share, graph))
            yield share, graph
            del graph  # freed before the next one is built


class Hessian(Curvature[tuple[Tensor, Sequence[Tensor]]]):
    """H = ∇²L(w) of L(w) = (1/n) Σ_i loss(model_w(x_i), y_i) over all n samples.

    A product is exact, a double backward pass: Hv = ∇(∇L·v). Arguments are those of `Curvature`.

    >>> hessian = Hessian(nn.Linear(3, 1), nn.functional.mse_loss, (torch.ones(5, 3), torch.ones(5, 1)))
    >>> hessian(torch.ones(1, hessian.size))
    tensor([[8., 8., 8., 8.]])
    """

    def loss_and_gradient(self) -> tuple[Tensor, Tensor]:
        """L(w) and ∇L(w) `[P]`."""
        value, total = (torch.zeros(n, dtype=self.dtype, device=self.device) for n in ((), self.size))
        for share, (loss, gradient) in self._each_batch():
            value += share * loss.detach()
            total.add_(torch.cat([g.detach().flatten() for g in gradient]), alpha=share)
            del gradient, loss
        return value, finite(total, "gradient")

    def _build(self, x: Any, y: Any) -> tuple[Tensor, Sequence[Tensor]]:
        """The loss and its differentiable gradient."""
        loss = scalar(self.loss(call(self.model, x), y))
        return loss, gradient([loss], self.weights)

    def _product(self, graph: tuple[Tensor, Sequence[Tensor]], row: Sequence[Tensor]) -> Sequence[Tensor]:
        return vector_jacobian(graph[1], self.weights, row)


class Mean:
    """(1/N) Σ_k H_k, the Hessian of the mean of N losses."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        if not operators:
            raise UserError("operators: none given; at least one is needed")
        self.operators = operators
        self.size, self.dtype, self.device = operators[0].size, operators[0].dtype, operators[0].device

    def __call__(self, vectors: Tensor) -> Tensor:
        """Hv of every row v of `[k, P]`."""
        total = torch.zeros_like(vectors)
        for operator in self.operators:
            total.add_(operator(vectors), alpha=1 / len(self.operators))
        return total


def select(model: nn.Module, parameters: Sequence[str] | None = None) -> ParameterLayout:
    """The trainable parameters, or those of them that match a name (of a parameter or module) or pattern."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if not names:
        raise UserError(f"model: {type(model).__name__} has no parameters that require a gradient")
    if parameters is None:
        return ParameterLayout.of(model, names)
    wanted = [parameters] if isinstance(parameters, str) else list(parameters)
    for want in wanted:
        if not any(_means(want, name) for name in names):
            known = sorted({name.rpartition(".")[0] or name for name in names})
            raise UserError(f"parameters: {want!r} matches none; the modules with parameters are {', '.join(known)}")
    chosen = [name for name in names if any(_means(want, name) for want in wanted)]
    if not chosen:
        raise UserError("parameters: an empty list; name at least one parameter or module, or None for all")
    return ParameterLayout.of(model, chosen)


def random_signs(operator: Operator, count: int, generator: torch.Generator) -> Tensor:
    """`[count, P]` of ±1, drawn on the CPU so that every device gets the same."""
    signs = torch.randint(0, 2, (count, operator.size), generator=generator, dtype=torch.int8)
    return (2 * signs - 1).to(operator.device, operator.dtype)


def _allocated(device: torch.device) -> int:
    """Bytes of all tensors on a CUDA device."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _free(device: torch.device) -> int:
    """Bytes that can still be allocated there."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


@contextmanager
def arithmetic(tf32: bool) -> Iterator[None]:
    """TF32 or not, and the convolution algorithms that cuDNN measures as fastest: products repeat the same shapes."""
    cudnn = torch.backends.cudnn
    before, cudnn.benchmark = cudnn.benchmark, True
    try:
        with matmul_precision("tf32" if tf32 else "fp32"):
            yield
    finally:
        cudnn.benchmark = before


@contextmanager
def _twice_differentiable() -> Iterator[None]:
    """Forward passes by operations with a second derivative: that of fused attention is missing, that of the fused
    weight norm wrong, that of convolutions slow."""
    with sdpa_kernel(SDPBackend.MATH), Convolutions(), WeightNorms():
        yield


def _means(want: str, name: str) -> bool:
    return name == want or name.startswith(want + ".") or fnmatchcase(name, want)


def scalar(loss: Any) -> Tensor:
    """The loss of a batch, if it is one number."""
    if not isinstance(loss, Tensor) or loss.ndim:
        shape = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"loss: {shape}, a scalar tensor is needed: the mean over the batch")
    return loss


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """A precision in which derivatives are meaningful."""
    if dtype not in (torch.float32, torch.float64):
        raise UserError(f"dtype: {dtype}; torch.float32 and torch.float64 are allowed")
    return dtype


def gradient(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], vectors: Sequence[Tensor] | None = None
) -> Sequence[Tensor]:
    """Differentiable ∇(outputs·vectors) by the inputs; zeros where nothing depends on them."""
    if not any(t.requires_grad for t in outputs):
        return [torch.zeros_like(t) for t in inputs]
    return torch.autograd.grad(outputs, inputs, vectors, create_graph=True, materialize_grads=True)


def vector_jacobian(outputs: Sequence[Tensor], inputs: Sequence[Tensor], row: Sequence[Tensor]) -> Sequence[Tensor]:
    """∇(outputs·row) by the inputs: zero for the outputs that do not depend on them."""
    live = [(t, v) for t, v in zip(outputs, row, strict=True) if t.requires_grad]
    if not live:
        return [torch.zeros_like(t) for t in inputs]
    differentiable, vectors = zip(*live, strict=True)
    return torch.autograd.grad(
        differentiable, inputs, vectors, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def finite(result: Tensor, what: str) -> Tensor:
    """The result, unless it holds nan or inf."""
    if not result.isfinite().all():
        raise UserError(f"loss: not finite, or its derivatives are not: the {what} holds nan or inf; check the model")
    return result
