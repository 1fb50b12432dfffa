"""Which execution serves a model, chosen once for a run."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from fedman.execution.base import Batch, Execution
from fedman.execution.one_by_one import OneByOne
from fedman.execution.recurrent import is_recurrent
from fedman.execution.stacked_kernels import StackedKernels
from fedman.execution.vmapped import Vmapped
from fedman.models.parameters import flatten
from fedman.penalties import Penalty
from fedman.tasks import Task


def choose(
    model: nn.Module,
    task: Task,
    penalty: Penalty,
    precision: str,
    device: torch.device,
    chunk: int,
    example: tuple[Tensor, Tensor],
    shape: tuple[int, ...],
) -> Execution:
    """The fastest execution for chunks of `chunk` clients: the GPU kernels where they serve the model, vmap for
    several clients at once, the plain module for one and for what vmap cannot do. On a CPU PyTorch's own recurrent
    layers, one client after the other, take a third of the time of stacked ones.

    `example` is a small batch of inputs and targets on the device; `shape` is that of a stored image as the model sees
    it, and () for other samples.
    """
    if shape and StackedKernels.supports(model, task, penalty, precision, shape, device):
        return StackedKernels(model, task, penalty, precision, shape, device)
    if chunk > 1 and not (device.type == "cpu" and is_recurrent(model)):
        stacked = Vmapped(model, task, penalty, precision)
        problem = _refused(stacked, example)
        if problem is None:
            return stacked
        warnings.warn(
            f"clients are trained one after the other, since vmap cannot stack this model: {problem}", stacklevel=2
        )
    return OneByOne(model, task, penalty, precision)


def _refused(execution: Execution, example: tuple[Tensor, Tensor]) -> str | None:
    """Why an execution cannot compute the gradients of two clients on this batch; None if it can."""
    x, y = (v.expand(2, *v.shape) for v in example)
    w = flatten(execution.model).to(x.device, torch.float64 if execution.precision == "fp64" else torch.float32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of slow batching rules
            execution.gradient(w.expand(2, -1), Batch(execution.prepare(x), y), 1.0)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return " ".join(str(error).split())[:160]
    return None
