"""Hostile clients in the simulator: what they train on, and what they upload in place of their models.

An attacker trains and remembers as an honest client does; `SignFlip`, `Scaled` and `Collusion` alter the model that it
uploads, and the other vectors of the upload follow from that model. `LabelFlip` alters its labels. This module imports
without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from fedman.errors import UserError
from fedman.parts import Registry, hyperparameter

if TYPE_CHECKING:
    from torch import Tensor

    from fedman.training.batches import Samples

WHO = 0x41545441434B  # tells the draw of the attackers from those of batches


@dataclass(frozen=True)
class Attack:
    """Nobody attacks; the base of all attacks. A subclass is a frozen set of hyper-parameters."""

    title: ClassVar[str] = "none"
    relabels: ClassVar[bool] = False  # whether it has `labels` of its own

    def draw(self, seed: int, clients: int) -> frozenset[int]:
        """The numbers of the attackers, the same in every round."""
        return frozenset()

    def labels(self, y: Tensor, classes: int) -> Tensor:
        """The labels that attackers train on, from those they hold."""
        return y

    def upload(self, own: Tensor, honest: Tensor, theta: Tensor) -> Tensor:
        """The models `[A, P]` that the round's attackers upload, from their `own` `[A, P]`.

        They know θ and the models `honest` `[H, P]` of the round's other clients that are finite, as the server uses no
        others; where there are none, their own.
        """
        return own


@dataclass(frozen=True)
class Hostile(Attack):
    """A share of all clients attacks: round(share·N) of them, at least one, drawn from the seed."""

    attackers: float = hyperparameter(0.2, "share of the clients that attack", maximum=1.0)

    def draw(self, seed: int, clients: int) -> frozenset[int]:
        import torch

        from fedman.execution.hashing import bits

        count = max(1, round(self.attackers * clients)) if self.attackers else 0
        return frozenset(bits(seed, WHO, torch.arange(clients)).argsort(stable=True)[:count].tolist())


@dataclass(frozen=True)
class SignFlip(Hostile):
    """θ − s(w − θ): the client's update turned round, s times as long."""

    title = "sign flip"

    attack_scale: float = hyperparameter(8.0, "s, length of what attackers upload")

    def upload(self, own: Tensor, honest: Tensor, theta: Tensor) -> Tensor:
        return theta - self.attack_scale * (own - theta)


@dataclass(frozen=True)
class Scaled(Hostile):
    """θ + s(w − θ): the client's update, s times as long."""

    title = "scaled"

    attack_scale: float = hyperparameter(8.0, "s, length of what attackers upload")

    def upload(self, own: Tensor, honest: Tensor, theta: Tensor) -> Tensor:
        return theta + self.attack_scale * (own - theta)


@dataclass(frozen=True)
class LabelFlip(Hostile):
    """Attackers train on C − 1 − y in place of y, and upload what they learn."""

    title = "label flip"
    relabels = True

    def labels(self, y: Tensor, classes: int) -> Tensor:
        if y.ndim != 1 or y.is_floating_point() or classes < 2:
            raise UserError("attack: label-flip needs labels, one of several classes for every sample; choose another")
        return classes - 1 - y


@dataclass(frozen=True)
class Collusion(Hostile):
    """All attackers of a round upload μ − s·σ, the coordinates' mean and standard deviation (over H, not H − 1) of the
    honest models: no outlier, but all on the same side. Baruch et al., 'A Little Is Enough: Circumventing Defenses For
    Distributed Learning', 2019; there the attackers estimate μ and σ from their own models, here they know them.
    """

    title = "collusion"

    attack_scale: float = hyperparameter(1.5, "s, standard deviations from the honest mean")

    def upload(self, own: Tensor, honest: Tensor, theta: Tensor) -> Tensor:
        return (honest.mean(0) - self.attack_scale * honest.std(0, correction=0)).expand_as(own)


ATTACKS = Registry(
    "attack",
    Attack,
    {"none": Attack, "sign-flip": SignFlip, "scaled": Scaled, "label-flip": LabelFlip, "collusion": Collusion},
)
"""The attacks by name; the first is the default."""


def relabelled(attack: Attack, attackers: Collection[int], samples: Samples, classes: int) -> Samples:
    """The samples, with the labels that the attackers train on; so does an honest client that holds one of theirs."""
    if not attack.relabels:
        return samples
    y = samples.y.clone()
    for k in attackers:
        y[samples.parts[k]] = attack.labels(samples.y[samples.parts[k]], classes)
    return replace(samples, y=y)


def poisoned(attack: Attack, attackers: Collection[int], clients: Sequence[int], w: Tensor, theta: Tensor) -> Tensor:
    """The models `[S, P]` of these clients, those of the attackers among them as they upload them."""
    from fedman.execution.transfer import send

    hostile = send([i for i, k in enumerate(clients) if k in attackers], w.device)
    others = send([k not in attackers for k in clients], w.device)
    honest = w[others & w.isfinite().all(-1)]
    uploaded = attack.upload(w[hostile], honest if len(honest) else w[hostile], theta)
    return w.index_copy(0, hostile, uploaded.to(w.dtype))
