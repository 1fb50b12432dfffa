"""What a penalty is: terms that are added to a client's loss, ζ times their sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from fedman.parts import hyperparameter

if TYPE_CHECKING:
    from torch import Tensor, nn


class Terms(Protocol):
    """The terms of a penalty, measured in the latest forward pass of the model it is attached to."""

    def terms(self, weight: Tensor | None = None) -> Mapping[str, Tensor]:
        """Scalars by name. `weight` `[B]` is each sample's share in its batch's mean; None: equal shares."""


@dataclass(frozen=True)
class Penalty(ABC):
    """A client's objective is F = loss + ζ·Σ terms. A subclass is a frozen set of hyper-parameters, ζ first."""

    title: ClassVar[str]

    zeta: float = hyperparameter(0.0, "ζ, weight of the penalty; 0 = plain algorithm")

    @abstractmethod
    def attach(self, model: nn.Module) -> Terms:
        """Hooks on the model that measure the terms whenever it is called. Works under `torch.func.vmap`."""
