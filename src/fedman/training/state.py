"""The state of a run between rounds: the server's vectors, and what is kept of every client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedman.algorithms import State

Notes = dict[str, str | dict[str, list[int | str]]]
"""What a client store keeps beside tensors, fit for JSON."""


class ClientStore(Protocol):
    """What is kept of the clients between rounds."""

    def uploads(self, ids: Sequence[int]) -> Tensor | None:
        """What these clients have uploaded last, `[S, P]` on the device of the model; None if that is not kept here."""

    def memories(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """What these clients remember, `[S, P]` each on the device of the model; nothing if they keep it themselves."""

    def save(self, t: int, ids: Sequence[int], w: Tensor, memory: State) -> None:
        """After round t: these clients' uploads `[S, P]` and new memories."""

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
    server: dict[str, Tensor]  # [P] each
    clients: ClientStore
    sel: Tensor  # [P], the mean upload of the last round
    total: Tensor | None  # [P] in float64: the sum of everyone's last upload, weighted as uploads are; None: not kept
    seen: list[bool]  # [N], who has taken part
