"""What a task is: a loss and scores for every sample. Training, evaluation, flatness and Flower use the same object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from fedman.data.dataset import Dataset


@dataclass(frozen=True)
class Task(ABC):
    """What is learnt. A subclass is a frozen set of hyper-parameters.

    `output` is what the model returns for a batch of B samples, `target` their targets `[B, ...]`. A task gives values
    of single samples; means, shares and masks are left to the training loop.
    """

    title: ClassVar[str]
    headline: ClassVar[str]  # the score by which runs are compared
    higher_is_better: ClassVar[bool]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A loss of one's own, or of a class that comes first, has its own mean."""
        super().__init_subclass__(**kwargs)
        loss, mean = (next(i for i, c in enumerate(cls.__mro__) if name in vars(c)) for name in ("loss", "mean_loss"))
        if loss < mean:
            cls.mean_loss = Task.mean_loss  # type: ignore[method-assign]

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of every sample, `[B]`."""

    @abstractmethod
    def scores(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """Scores of every sample by name, `[B]` each: what a test set is evaluated by."""

    def mean_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean of `loss` over the batch; override it where one call computes both."""
        return self.loss(output, target).mean()

    def weight(self, target: Tensor) -> Tensor | None:
        """`[B]`: how much each sample counts in the means over a test set; None: all the same."""
        return None

    def summarise(self, means: Mapping[str, float]) -> dict[str, float]:
        """The figures of a test set from the means of "loss" and of the scores over it: by default the scores."""
        return {name: mean for name, mean in means.items() if name != "loss"}

    def outputs(self, data: Dataset) -> int:
        """The number of outputs that a model needs for this data; built-in models are made with so many."""
        return data.classes

    def check(self, data: Dataset, output_shape: tuple[int, ...]) -> None:  # noqa: B027
        """Raise a `UserError` where targets or the model's outputs `[B, ...]` do not fit this task."""


def format_outputs(shape: tuple[int, ...]) -> str:
    """What a model gives for a sample, from the shape `[B, ...]` of its output.

    >>> format_outputs((2, 5)), format_outputs((2, 1)), format_outputs((2, 5, 3))
    ('5 outputs a sample', '1 output a sample', 'outputs of shape 5x3 a sample')
    """
    if len(shape) == 2:
        return f"{shape[1]} output{'' if shape[1] == 1 else 's'} a sample"
    return f"outputs of shape {'x'.join(map(str, shape[1:])) or 1} a sample"
