"""The state of a run between rounds, and the tables `[N, P]` in it: one row for every client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedman.algorithms import Algorithm


@dataclass
class Federation:
    """The state of a run between rounds: all that a checkpoint must hold."""

    round: int  # rounds done
    server: dict[str, Tensor]  # [P] each
    memory: dict[str, Tensor]  # [N, P] each: what the clients keep
    last: Tensor  # [N, P], x_k: everyone's most recent upload, the common start for those never seen
    total: Tensor  # [P] in float64: the sum of `last`, weighted as the uploads are
    sel: Tensor  # [P], the mean upload of the last round
    seen: list[bool] = field(default_factory=list)  # [N], who has taken part
    notes: dict[str, Any] = field(default_factory=dict)  # of an engine whose clients are elsewhere; fit for JSON


def start(w: Tensor, algorithm: Algorithm, shares: Sequence[float], tables: bool = True) -> Federation:
    """Round 0: every client's last model is the common start w, every memory is zero. Without `tables` none is kept."""
    clients = len(shares)
    home = home_of_tables(w, clients * (1 + len(algorithm.client)))
    return Federation(
        round=0,
        server={name: w.clone() if name == "w" else torch.zeros_like(w) for name in algorithm.server},
        memory={name: _table(torch.zeros_like(w), clients, home) for name in algorithm.client if tables},
        last=_table(w if tables else w[:0], clients, home),
        total=w.double() * sum(shares),
        sel=w,
        seen=[False] * clients,
    )


def home_of_tables(w: Tensor, rows: int) -> torch.device:
    """Where the tables live: beside the model, or in the host's memory if they would fill most of a GPU's."""
    if w.is_cuda and rows * w.nbytes > 0.6 * torch.cuda.mem_get_info(w.device)[0]:
        return torch.device("cpu")
    return w.device


def _table(row: Tensor, rows: int, home: torch.device) -> Tensor:
    pinned = row.is_cuda and home.type == "cpu"
    return torch.empty(rows, len(row), dtype=row.dtype, device=home, pin_memory=pinned).copy_(row)


def take(table: Tensor, ids: list[int], clients: Tensor) -> Tensor:
    """The rows of some clients on the device of `clients`, which are `ids` there; the table may be on the host."""
    return table[clients] if table.device == clients.device else table[ids].pin_memory().to(clients.device)


def put(table: Tensor, ids: list[int], clients: Tensor, rows: Tensor) -> None:
    """Write rows that `take` would read."""
    if table.device == clients.device:
        table[clients] = rows
    else:
        table[ids] = rows.to(table.device)
