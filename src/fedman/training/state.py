"""The state of a run between rounds: the server's vectors, and what is kept of every client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedman.algorithms import State
from fedman.execution.transfer import send
from fedman.training.settings import BUFFERS

Notes = dict[str, str | dict[str, list[int | str]]]
"""What a client store keeps beside tensors, fit for JSON."""


def joined(vectors: State) -> Tensor:
    """A model as it is stored and evaluated, `[..., P + Q]`: its parameters "w", then its buffers, if it has any."""
    return torch.cat([vectors["w"], vectors[BUFFERS]], -1) if BUFFERS in vectors else vectors["w"]


class ClientStore(Protocol):
    """What is kept of the clients between rounds. Models are `[P + Q]`: see `joined`."""

    def uploads(self, ids: Sequence[int]) -> Tensor | None:
        """The models that these clients have uploaded last, `[S, P + Q]` on the device of the model; None if they are
        not kept here."""

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
    sel: Tensor  # [P + Q], the mean upload of the last round
    total: (
        Tensor | None
    )  # [P + Q] in float64: the sum of everyone's last upload, weighted as uploads are; None: not kept
    seen: list[bool]  # [N], who has taken part


class ClientTables:
    """A row for every client, in tables: its last upload, and its memory.

    The tables lie beside the model, or in the host's memory if they would fill most of a GPU's.
    """

    def __init__(self, w: Tensor, clients: int, memory: State) -> None:
        """Before round 0: everyone's last model is the common start w, every memory the row given for it."""
        home = w.device
        if (
            w.is_cuda
            and clients * (w.nbytes + sum(v.nbytes for v in memory.values()))
            > 0.6 * torch.cuda.mem_get_info(w.device)[0]
        ):
            home = torch.device("cpu")
        self.device = w.device
        self.last = _table(w, clients, home)  # x_k, the common start for those never seen
        self.memory = {name: _table(row, clients, home) for name, row in memory.items()}

    def uploads(self, ids: Sequence[int]) -> Tensor:
        return self._take(self.last, ids)

    def memories(self, ids: Sequence[int]) -> dict[str, Tensor]:
        return {name: self._take(rows, ids) for name, rows in self.memory.items()}

    def save(self, t: int, ids: Sequence[int], w: Tensor, memory: State) -> None:
        self._put(self.last, ids, w)
        for name, rows in memory.items():
            self._put(self.memory[name], ids, rows)

    def tensors(self, seen: Sequence[int]) -> dict[str, Tensor]:
        """The rows of those seen; the others still are where they started."""
        tables = {"last": self.last, **{f"memory.{name}": rows for name, rows in self.memory.items()}}
        return {name: rows[list(seen)] for name, rows in tables.items()}

    def notes(self) -> Notes:
        return {}

    def restore(self, seen: Sequence[int], tensors: Mapping[str, Tensor], notes: Notes) -> None:
        self.last[list(seen)] = tensors["last"].to(self.last.device)
        for name, rows in self.memory.items():
            rows[list(seen)] = tensors[f"memory.{name}"].to(rows.device)

    def _take(self, table: Tensor, ids: Sequence[int]) -> Tensor:
        if table.device == self.device:
            return table[send(ids, self.device)]
        return table[list(ids)].pin_memory().to(self.device)

    def _put(self, table: Tensor, ids: Sequence[int], rows: Tensor) -> None:
        if table.device == self.device:
            table[send(ids, self.device)] = rows
        else:
            table[list(ids)] = rows.to(table.device)


def _table(row: Tensor, rows: int, home: torch.device) -> Tensor:
    pinned = row.is_cuda and home.type == "cpu"
    return torch.empty(rows, len(row), dtype=row.dtype, device=home, pin_memory=pinned).copy_(row)
