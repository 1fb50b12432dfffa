"""The state of a run between rounds: the server's vectors, and what is kept of every client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedman.algorithms import State
from fedman.training.settings import BUFFERS

Notes = dict[str, str | dict[str, list[int | str]]]
"""What a client store keeps beside tensors, fit for JSON."""


def joined(vectors: State) -> Tensor:
    """A model as it is stored and evaluated, `[..., P + Q]`: its parameters "w", then its buffers, if it has any."""
    return torch.cat([vectors["w"], vectors[BUFFERS]], -1) if BUFFERS in vectors else vectors["w"]


class ClientStore(Protocol):
    """What is kept of the clients between rounds. Models are `[P + Q]`: see `joined`."""

    def uploads(self, ids: Sequence[int]) -> Sequence[Tensor] | None:
        """The models that these clients have uploaded last, `[P + Q]` each on the device of the model; None if they are
        not kept here. To be read before the next `save`: they may lie where that writes."""

    def memories(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """What these clients remember, `[S, P]` each on the device of the model; nothing if they keep it themselves."""

    def save(self, t: int, ids: Sequence[int], w: Tensor, memory: State) -> None:
        """After round t: the models `[S, P + Q]` that these clients have uploaded, and their new memories."""

    def tensors(self, seen: Sequence[int]) -> dict[str, Tensor]:
        """What a checkpoint holds of the clients that have taken part."""

    def notes(self) -> Notes:
        """What a checkpoint holds beside tensors."""

    def restore(self, seen: Sequence[int], tensors: Mapping[str, Tensor], notes: Notes) -> None:
        """Go back to what a checkpoint holds."""


@dataclass
class RunState:
    """The state of a run between rounds: all that a checkpoint must hold."""

    round: int  # rounds done
    server: dict[str, Tensor]  # [P] each, and the buffers [Q] that clients start from
    clients: ClientStore
    sel: dict[str, Tensor]  # the mean upload of the last round: "w" [P], and the buffers [Q]
    total: Tensor | None  # [P + Q] in float64: the weighted sum of everyone's last upload; None: not kept
    seen: list[bool]  # [N], who has taken part
