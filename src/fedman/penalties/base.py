"""What a penalty is: terms that are added to a client's loss, ζ times their sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from fedman.errors import UserError, describe, shown_type
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

    def check(self, model: str) -> None:  # noqa: B027
        """Raise a `UserError` where hyper-parameters do not go together, or not with the model of this name."""


def attach(penalty: Penalty, model: nn.Module) -> Terms:
    """`penalty.attach(model)`, checked."""
    name = type(penalty).__name__
    try:
        attached = penalty.attach(model)
    except UserError:
        raise
    except Exception as error:  # a user's penalty may raise anything
        raise UserError(f"penalty: {name}.attach failed for {type(model).__name__} ({describe(error)})") from error
    if not callable(getattr(attached, "terms", None)):
        what = shown_type(attached)
        raise UserError(f"penalty: {name}.attach returned {what}, not an object with a method terms(weight)")
    return attached


def check_terms(penalty: Penalty, terms: object) -> Mapping[str, Tensor]:
    """What `terms(weight)` of an attached penalty returned, if it is a mapping from names to scalar tensors."""
    import torch

    where = f"penalty: terms of {type(penalty).__name__}"
    if not isinstance(terms, Mapping):
        raise UserError(f"{where} are {shown_type(terms)}, not a mapping from names to scalar tensors")
    if not terms:
        raise UserError(f"{where} are empty; at least one is needed")
    for name, term in terms.items():
        if not isinstance(name, str):
            raise UserError(f"{where}: {name!r} is not a name (a str)")
        if not isinstance(term, torch.Tensor):
            raise UserError(f"{where}: {name!r} is {shown_type(term)}, not a scalar tensor")
        if term.ndim:
            raise UserError(f"{where}: {name!r} has shape {tuple(term.shape)}; a scalar has none")
        if not term.is_floating_point():
            raise UserError(f"{where}: {name!r} has type {term.dtype}, which has no gradient")
    return cast("Mapping[str, Tensor]", terms)
