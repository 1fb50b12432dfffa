"""Which execution serves a model, chosen once for a run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fedman.execution.base import Execution
from fedman.execution.one_by_one import OneByOne
from fedman.execution.stacked_kernels import StackedKernels
from fedman.execution.vmapped import Vmapped
from fedman.penalties.man import Measure


def choose(
    model: nn.Module,
    shape: tuple[int, ...],
    device: torch.device,
    precision: str,
    chunk: int,
    *,
    output: bool = True,
    layers: Mapping[str, Measure] | None = None,
) -> Execution:
    """The fastest execution for chunks of `chunk` clients: the GPU kernels where they serve the model, vmap for
    several clients at once, the plain module for one.

    `shape` is that of a stored image as the model sees it, and () for other samples.
    """
    if shape and StackedKernels.supports(model, shape, device, layers=layers, precision=precision):
        return StackedKernels(model, shape, device, output=output, layers=layers, precision=precision)
    kind = OneByOne if chunk == 1 else Vmapped
    return kind(model, output=output, layers=layers, precision=precision)
