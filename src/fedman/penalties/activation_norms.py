"""Penalties on the size of activations: MAN, the paper's, and its ablations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.errors import UserError
from fedman.models import MAN_VARIANTS, man_variant
from fedman.parts import hyperparameter
from fedman.penalties.base import Penalty, Terms

if TYPE_CHECKING:
    from torch import nn

    from fedman.penalties.measures import Measure

VARIANTS = ", ".join(f"{name} (model {v.model})" if v.model else name for name, v in MAN_VARIANTS.items())


@dataclass(frozen=True)
class MeanSquares(Penalty):
    """Σ_l mean square activation over a set of layers l; see `fedman.ActivationNorm`."""

    @abstractmethod
    def measured(self) -> tuple[Mapping[str, Measure] | None, bool]:
        """`layers` and `output` of the `ActivationNorm`."""

    def attach(self, model: nn.Module) -> Terms:
        from fedman.penalties.man import ActivationNorm

        layers, output = self.measured()
        return ActivationNorm(model, layers, output=output)


@dataclass(frozen=True)
class MAN(MeanSquares):
    """All hidden activations and the logits: the paper's formula, and the forms that its published code has."""

    title = "MAN"

    man_logits: bool = hyperparameter(True, "count the logits among MAN's layers (the paper's formula)")
    man_variant: str = hyperparameter("formula", f"form of the MAN term: {VARIANTS}")

    def measured(self) -> tuple[Mapping[str, Measure] | None, bool]:
        from fedman.penalties.measures import MEASURES

        layers = man_variant(None, self.man_variant).layers
        return None if layers is None else {name: MEASURES[m] for name, m in layers.items()}, self.man_logits

    def check(self, model: str) -> None:
        variant = man_variant(model, self.man_variant)
        if self.man_logits and not variant.logits:
            raise UserError(f"man_variant: {self.man_variant} has no logits term; add man_logits=false")


@dataclass(frozen=True)
class HiddenMAN(MeanSquares):
    """MAN without the logits."""

    title = "MAN-hidden"

    def measured(self) -> tuple[Mapping[str, Measure] | None, bool]:
        return None, False


@dataclass(frozen=True)
class LogitsMAN(MeanSquares):
    """MAN of the logits alone."""

    title = "MAN-logits"

    def measured(self) -> tuple[Mapping[str, Measure] | None, bool]:
        return {}, True


@dataclass(frozen=True)
class ActivationL1(Penalty):
    """Σ_l mean |a_l| over the layers of MAN: is it the square that helps?"""

    title = "L1"

    def attach(self, model: nn.Module) -> Terms:
        from fedman.penalties.man import ActivationNorm
        from fedman.penalties.measures import mean_absolute

        return ActivationNorm(model, measure=mean_absolute)


def mean_squares_of(penalty: Penalty) -> tuple[Mapping[str, Measure] | None, bool] | None:
    """`layers` and `output` of an `ActivationNorm` that equals the penalty, which is all that the GPU kernels serve;
    None for any other penalty, also for one that inherits from MAN and attaches something of its own."""
    if isinstance(penalty, MeanSquares) and type(penalty).attach is MeanSquares.attach:
        return penalty.measured()
    return None
