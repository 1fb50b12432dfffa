"""Which execution serves a model, chosen once for a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from fedman import kernels
from fedman.errors import UserError, describe, one_line
from fedman.execution.base import Execution, is_large
from fedman.execution.branches import Branches, Stack
from fedman.execution.one_by_one import OneByOne
from fedman.execution.recurrent import is_recurrent
from fedman.execution.stacked_kernels import StackedKernels
from fedman.execution.trial import Example, Trial, refused
from fedman.execution.vmapped import Vmapped
from fedman.models.parameters import ParameterLayout
from fedman.penalties import Penalty
from fedman.tasks import Task

COMPILE_FROM = 100_000
"""Gradients of single clients in a run from which compiling pays: it takes 17 to 75 s and saves 0.1 to 0.9 ms each."""


def choose(
    model: nn.Module,
    task: Task,
    penalty: Penalty,
    precision: str,
    device: torch.device,
    chunk: int,
    example: Example,
    shape: tuple[int, ...],
    wanted: str = "auto",
    gradients: int = 0,
    zeta: float = 1.0,
    padded: bool = False,
) -> Execution:
    """The execution `wanted`, or with "auto" the fastest for chunks of `chunk` clients that serves the model.

    `example` is a small batch of inputs and targets on the device; `shape` is that of a stored image as the model sees
    it, and () for other samples. `gradients` are those of single clients in the whole run. `zeta` is the weight of the
    penalty, of several runs the largest. `padded`: whether a stack fills clients up, as they are of unequal sizes or
    have partial batches. The choice depends on nothing else, so that the same run has the same bits.
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
    execution = _first(order, made, example, zeta, padded)
    if isinstance(execution, OneByOne) and torch.are_deterministic_algorithms_enabled():
        tried = OneByOne(*parts)
        tried.strict = True
        execution.strict = refused(tried, example, zeta) is None
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
    order: Sequence[str],
    made: Mapping[str, Callable[[], Execution]],
    example: Example,
    zeta: float = 1.0,
    padded: bool = False,
) -> Execution:
    """The first in the order that serves the model: all but vmap take any module that PyTorch trains.

    A model with a convolution that vmap stacks badly is passed on from a compiled stack, if there is a choice; one that
    mixes the samples of a batch is not stacked on a CPU, where clients alone need no padding.
    """
    trial = None
    for name, following in zip(order, [*order[1:], None], strict=True):
        execution = made[name]()
        if not isinstance(execution, OneByOne):
            return execution
        model, task, penalty, _ = execution.parts
        kind = Vmapped if isinstance(execution, Vmapped) else OneByOne
        tried = kind(*execution.parts)  # nothing is compiled for the example
        error = refused(tried, example, zeta)
        if error is not None and kind is OneByOne:
            raise UserError(f"model: a step of {type(model).__name__} fails ({describe(error)})") from error
        if kind is OneByOne and example[0].device.type == "cpu" and is_large(execution.parameters.size):
            return execution  # neither stacked nor padded, and more steps would take seconds
        trial = trial or Trial(model, task, penalty, example, zeta, padded)
        if kind is OneByOne:
            _warn_of_odd_models(trial, stacked=False, device=example[0].device)
            return execution
        why = None if error is None else f"cannot stack this model: {one_line(error)}"
        if why is None and not trial.agrees(Vmapped):
            why = "gives other gradients of this model than PyTorch does"
        if why is None and following == "plain" and not trial.ignores_padding():
            why = f"{PADS}, and {MIXES}"
        if why is None and isinstance(execution, Stack) and following and isinstance(tried, Vmapped) and tried.slow:
            why = f"stacks a {tried.slow} of this model badly"
        if why is None:
            _warn_of_odd_models(trial, stacked=True, device=example[0].device)
            return execution
        if following is None:
            problem = why.removeprefix("cannot stack this model: ")
            raise UserError(f"execution: vmap cannot serve this model: {problem}")
        warnings.warn(f"execution: {following}, since vmap {why}", stacklevel=3)
    raise AssertionError("an order is never empty")


PADS = "pads clients of unequal sizes with other samples"
MIXES = "what this model makes of a sample depends on the others in its batch"


def _warn_of_odd_models(trial: Trial, stacked: bool, device: torch.device) -> None:
    """Say so where results depend on more than weights, batch and seed."""
    if not trial.repeats:
        warnings.warn(
            "the model keeps something from one call to the next, or draws random numbers that do not come from the "
            "run's seed: runs that are repeated, resumed or computed another way will differ",
            stacklevel=4,
        )
    elif (stacked or device.type == "cuda") and not trial.ignores_padding():
        where = "vmap" if stacked else "a GPU"
        warnings.warn(f"{where} {PADS}, and {MIXES}: execution=plain with device=cpu avoids it", stacklevel=4)
