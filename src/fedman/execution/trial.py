"""Steps of training on two samples, before the first round: whether an execution serves a model as PyTorch would."""

from __future__ import annotations

import warnings
from contextlib import suppress

import torch
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.execution.base import Batch, Execution
from fedman.execution.device import matmul_precision
from fedman.execution.one_by_one import OneByOne
from fedman.models.parameters import flatten, flatten_buffers
from fedman.penalties import Penalty
from fedman.tasks import Task

Example = tuple[Tensor, Tensor]
"""A small batch of inputs and targets on the device."""


def refused(execution: Execution, example: Example, zeta: float) -> Exception | None:
    """Why an execution cannot compute the gradients of two clients on this batch; None if it can."""
    x, y = (torch.stack([v, v]) for v in example)
    try:
        _step(execution, Batch(x, y, key=torch.arange(2, device=x.device)), zeta)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a user's module may raise anything
        return error
    return None


PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32}
"""In which steps are compared: the first that a model takes."""

TOLERANCE = 1e-4
"""How far apart they may be. Batch-norms over two values a channel enlarge rounding: 4e-5 was seen of a RegNet in
float64 (`benchmarks/published_models.py`); what is computed otherwise is further off."""


class Trial:
    """The steps of two clients in float64, which are the same whatever computes them, up to rounding; of a model that
    does not take float64 in float32.

    Where batches are `padded`, one of the clients has a sample less than the other. What memory does not suffice for is
    not compared: a run in float32 may fit where steps in float64 do not.
    """

    def __init__(
        self, model: nn.Module, task: Task, penalty: Penalty, example: Example, zeta: float, padded: bool
    ) -> None:
        order, self.zeta = torch.tensor([[0, -1, 0], [-1, 0, 0]]), zeta
        x, y = (each[order.to(each.device)] for each in example)
        weight = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [1 / 2, 1 / 2, 0]], dtype=torch.float64, device=x.device)
        whole = Batch(x, y, weight if padded else None, torch.arange(2, device=x.device))
        self.expected: Tensor | None = None  # nothing can be compared
        for precision, dtype in PRECISIONS.items():
            self.parts = model, task, penalty, precision
            self.batch = Batch._make(v.to(dtype) if v is not None and v.is_floating_point() else v for v in whole)
            plain = OneByOne(*self.parts)
            with suppress(torch.OutOfMemoryError):
                self.expected = self._steps(plain, [self.batch])
            if self.expected is not None:
                break
        self.repeats = self._as_expected(plain, [self.batch])  # the same step once more is the same
        if not self.repeats:
            self.expected = None

    def agrees(self, kind: type[OneByOne]) -> bool:
        """Whether an execution takes the steps of the plain module."""
        return self._as_expected(kind(*self.parts), [self.batch])

    def ignores_padding(self) -> bool:
        """Whether the steps are those without the samples of padding."""
        x, y, key = self.batch.x, self.batch.y, torch.arange(2, device=self.batch.y.device)
        alone = [Batch(x[i : i + 1, :n], y[i : i + 1, :n], None, key[i : i + 1]) for i, n in enumerate((3, 2))]
        return self.batch.weight is None or self._as_expected(OneByOne(*self.parts), alone)

    def _as_expected(self, execution: OneByOne, batches: list[Batch]) -> bool:
        if self.expected is None:
            return True
        with suppress(torch.OutOfMemoryError):
            found = self._steps(execution, batches)
            if found is None:
                return False
            far = (found - self.expected).norm() > TOLERANCE * self.expected.norm()
            return not bool(far) and torch.equal(found.isnan(), self.expected.isnan())
        torch.cuda.empty_cache()
        return True

    @matmul_precision("fp32")
    def _steps(self, execution: OneByOne, batches: list[Batch]) -> Tensor | None:
        """What the steps give as rows of the two clients; None where there is an error."""
        try:
            return torch.cat([_step(execution, batch, self.zeta) for batch in batches])
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a user's module may raise anything
            return None


def _step(execution: Execution, batch: Batch, zeta: float) -> Tensor:
    """Gradient, loss, buffers and terms as one matrix, of models a little away from the start: there are many zeros."""
    dtype = torch.float64 if execution.precision == "fp64" else torch.float32
    w = flatten(execution.model).to(batch.y.device, dtype)
    w = w + 0.01 * torch.arange(len(w), device=w.device, dtype=dtype).cos()
    buffers = flatten_buffers(execution.model).to(w)
    W = w.expand(len(batch.y), -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of slow batching rules
        batch = batch._replace(x=execution.prepare(batch.x), buffers=buffers.expand(len(W), -1))
        gradient, loss, after = execution.gradient(W, batch, zeta)
        terms = execution.penalty_terms(W, batch)
    return torch.cat([gradient, torch.stack([loss, *terms.values()], 1), after], 1)
