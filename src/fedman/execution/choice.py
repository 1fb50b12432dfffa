"""Which execution serves a model, chosen once for a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedman import kernels
from fedman.errors import UserError, one_line
from fedman.execution.base import Batch, Execution, is_large
from fedman.execution.branches import Branches, Stack
from fedman.execution.one_by_one import OneByOne
from fedman.execution.recurrent import is_recurrent
from fedman.execution.stacked_kernels import StackedKernels
from fedman.execution.vmapped import Vmapped
from fedman.models.parameters import ParameterLayout, flatten, flatten_buffers
from fedman.penalties import Penalty
from fedman.tasks import Task

COMPILE_FROM = 100_000
"""Gradients of single clients in a run from which compiling pays: it takes 10 to 100 s and saves 0.1 to 0.8 ms each."""


def choose(
    model: nn.Module,
    task: Task,
    penalty: Penalty,
    precision: str,
    device: torch.device,
    chunk: int,
    example: tuple[Tensor, Tensor],
    shape: tuple[int, ...],
    wanted: str = "auto",
    gradients: int = 0,
) -> Execution:
    """The execution `wanted`, or with "auto" the fastest for chunks of `chunk` clients that serves the model.

    `example` is a small batch of inputs and targets on the device; `shape` is that of a stored image as the model sees
    it, and () for other samples. `gradients` are those of single clients in the whole run. The choice depends on
    nothing else, so that the same run has the same bits.
    """
    parts = model, task, penalty, precision
    long = device.type == "cuda" and gradients >= COMPILE_FROM
    stacked = long and is_large(ParameterLayout.of(model).size) and not is_recurrent(model)
    made: dict[str, Callable[[], Execution]] = {
        "kernels": lambda: StackedKernels(*parts, shape, device),
        "vmap": lambda: Stack(*parts, compiled=True) if stacked else Vmapped(*parts),
        "branches": lambda: Branches(*parts, compiled=long),
        "plain": lambda: OneByOne(*parts),
    }
    served = bool(shape) and StackedKernels.supports(*parts, shape, device)
    if wanted == "kernels" and not served:
        raise UserError(
            "execution: kernels serve fedman's ConvNets of images on a GPU, in fp32, tf32 or bf16; use auto"
        )
    order = [wanted] if wanted != "auto" else ["kernels"] * served + _order(model, device, chunk, stacked)
    execution = _first(order, made, example)
    if isinstance(execution, OneByOne) and torch.are_deterministic_algorithms_enabled():
        tried = OneByOne(*parts)
        tried.strict = True
        execution.strict = _refused(tried, example) is None
    if execution.fused is None and precision != "fp64" and kernels.available(device):
        from fedman.kernels import update

        execution.fused = update
    return execution


def _order(model: nn.Module, device: torch.device, chunk: int, stacked: bool) -> list[str]:
    """Executions for a model without kernels of its own, the most promising first.

    On a GPU vmap is the fastest for models whose calls cost more than their arithmetic, for recurrent ones, whose
    steps it takes for all clients at once, and where it is compiled (`stacked`); branches for all others. On a CPU vmap
    serves small models, but recurrent layers one client after the other take a third of the time of stacked ones.
    """
    small = not is_large(ParameterLayout.of(model).size)
    if device.type == "cuda":
        return ["vmap", "branches"] if chunk > 1 and (small or stacked or is_recurrent(model)) else ["branches"]
    return ["vmap", "plain"] if chunk > 1 and not is_recurrent(model) else ["plain"]


def _first(
    order: Sequence[str], made: Mapping[str, Callable[[], Execution]], example: tuple[Tensor, Tensor]
) -> Execution:
    """The first in the order that serves the model: all but vmap take any module.

    A model with a convolution that vmap stacks badly is passed on from a compiled stack, if there is a choice.
    """
    for name, following in zip(order, [*order[1:], None], strict=True):
        execution = made[name]()
        if not isinstance(execution, Vmapped):
            return execution
        tried = Vmapped(*execution.parts)  # nothing is compiled for the example
        problem = _refused(tried, example)
        if problem is None and not (isinstance(execution, Stack) and following and tried.slow):
            return execution
        if following is None:
            raise UserError(f"execution: vmap cannot serve this model: {problem}")
        why = f"cannot stack this model: {problem}" if problem else f"stacks a {tried.slow} of this model badly"
        warnings.warn(f"execution: {following}, since vmap {why}", stacklevel=3)
    raise AssertionError("an order is never empty")


def _refused(execution: Execution, example: tuple[Tensor, Tensor]) -> str | None:
    """Why an execution cannot compute the gradients of two clients on this batch; None if it can."""
    x, y = (v.expand(2, *v.shape) for v in example)
    w = flatten(execution.model).to(x.device, torch.float64 if execution.precision == "fp64" else torch.float32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of slow batching rules
            buffers = flatten_buffers(execution.model).to(w).expand(2, -1)
            execution.gradient(w.expand(2, -1), Batch(execution.prepare(x), y, buffers=buffers), 1.0)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a user's module may raise anything
        return one_line(error)
    return None
