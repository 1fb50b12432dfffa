"""From what the clients bring back to the state after the round: the same wherever they worked.

Uploads that are not finite are left out; the run's aggregation rule says what the others count as; sums over clients
are in float64 and in the cohort's order, so that the bits of a result do not depend on chunks, cores or who was faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fedman.aggregation.base import BLOCK
from fedman.algorithms import State
from fedman.errors import Diverged
from fedman.execution.device import one_thread_each
from fedman.execution.transfer import Fetched, send
from fedman.training.federation import Assignment, Federation
from fedman.training.settings import BUFFERS
from fedman.training.state import joined


@dataclass(frozen=True)
class Transfers:
    """How the replies of clients on other machines came about."""

    refused: dict[str, str]  # client -> why its reply was not used; "node N" -> why it cannot be a client
    attempts: int
    bytes_down: int  # of arrays, to all clients
    bytes_up: int  # of arrays that were used
    restarted: list[int]  # clients that had lost their memory and started without one


@dataclass(frozen=True)
class Trained:
    """What the clients of a round bring back. On a GPU the tensors may still be queued."""

    clients: list[int]  # whose rows these are, in the cohort's order
    upload: State  # [S, P] each: always the client's model "w"; its buffers [S, Q], where it has any
    memory: State  # [S, P] each: the clients' new memories, where they are kept here
    previous: Sequence[Tensor] | None  # [P + Q] each, the models that they uploaded before; None: not kept
    figures: dict[str, Tensor]  # [S] each: the "loss", and the terms of the penalty
    transfers: Transfers | None = None
    attackers: list[int] | None = None  # who of them attacked; None: nobody in the whole run

    def reports(self) -> Tensor:
        """`[S, F + 1]` in float64: the figures, and whether they and the upload are finite."""
        table = torch.stack(list(self.figures.values()), 1).double()
        ends = [end(v, -1) for v in (table, *self.upload.values()) if v.shape[-1] for end in (torch.amin, torch.amax)]
        finite = torch.stack([v.isfinite() for v in ends], 1).all(-1, keepdim=True)  # NaN is the least and the greatest
        return torch.cat([table, finite.double()], 1)


@dataclass(frozen=True)
class Outcome:
    """What a round reports."""

    cohort: list[int]
    quarantined: list[int]  # whose replies were not used; the round's result is the one without them
    lr: float
    loss: float  # without the penalty; the mean over the cohort's local steps
    penalty: dict[str, float]  # its terms by name, of the clients' final models on their first batch
    transfers: Transfers | None = None
    attackers: list[int] | None = None  # who of the cohort attacked; None: nobody in the whole run


def collect(now: Sequence[Assignment], trained: Sequence[Trained]) -> Iterator[Outcome | Diverged]:
    """Bring one run's state after the other to the end of its round; the state of one that diverged stays as it was."""
    reports = iter(Fetched(torch.cat([each.reports() for each in trained])).values())  # a round's one host sync
    for assignment, brought in zip(now, trained, strict=True):
        try:
            yield aggregate(assignment, brought, list(islice(reports, len(brought.clients))))
        except Diverged as error:
            yield error


def aggregate(assignment: Assignment, trained: Trained, reports: list[list[float]]) -> Outcome:
    """The server's step and the clients' memories, written to the state. `reports` are those of `trained`."""
    federation, state, round = assignment.federation, assignment.state, assignment.round
    good = [i for i, (*_, finite) in enumerate(reports) if finite]
    if not good:
        raise Diverged(f"round {round.number + 1}: the models of all {len(reports)} clients are not finite")
    upload, memory, previous = dict(trained.upload), dict(trained.memory), trained.previous
    if len(good) < len(reports):
        rows = send(good, federation.device)
        upload, memory = ({name: v[rows] for name, v in part.items()} for part in (upload, memory))
        previous = [previous[i] for i in good] if previous is not None else None
    ids = [trained.clients[i] for i in good]
    share = [federation.share[k] for k in ids]
    upload = _counted(federation, upload, share, state.server)
    total = {name: weighted_sum(v, share) for name, v in upload.items()}
    mean = {name: (v / sum(share)).to(federation.dtype) for name, v in total.items()}
    vectors, means = _without_buffers(state.server), _without_buffers(mean)
    server = dict(federation.algorithm.update(vectors, means, len(ids) / len(federation.share)))
    state.server = server | ({BUFFERS: mean[BUFFERS]} if BUFFERS in mean else {})
    state.sel = {name: v for name, v in mean.items() if name in ("w", BUFFERS)}
    if state.total is not None and previous is not None:
        state.total += joined(total) - weighted_sum(previous, share)
    state.clients.save(round.number, ids, joined(upload), memory)
    for k in ids:
        state.seen[k] = True
    state.round += 1
    figures = {name: statistics.fmean(reports[i][j] for i in good) for j, name in enumerate(trained.figures)}
    return Outcome(
        cohort=list(round.cohort),
        quarantined=[k for k in round.cohort if k not in ids],
        lr=round.lr,
        loss=figures.pop("loss"),
        penalty=figures,
        transfers=trained.transfers,
        attackers=trained.attackers,
    )


def _counted(federation: Federation, upload: State, share: Sequence[float], server: State) -> dict[str, Tensor]:
    """What the uploads count as by the run's rule, `[S, P]` each. Of buffers the rule sees the changes."""
    weights = send(share, federation.device, torch.float64)
    shown = upload if BUFFERS not in upload else {**upload, BUFFERS: upload[BUFFERS] - server[BUFFERS]}
    with one_thread_each(federation.device):
        counted = dict(federation.aggregation.aggregate(shown, weights, server))
    if BUFFERS in upload:
        same = counted[BUFFERS] is shown[BUFFERS]
        counted[BUFFERS] = upload[BUFFERS] if same else server[BUFFERS] + counted[BUFFERS]
    return {name: counted[name].to(v.dtype).expand_as(v) for name, v in upload.items()}


def _without_buffers(vectors: State) -> dict[str, Tensor]:
    return {name: v for name, v in vectors.items() if name != BUFFERS}


def weighted_sum(rows: Sequence[Tensor] | Tensor, weights: Sequence[float]) -> Tensor:
    """Σ weight·row in float64 and in the order given: the same bits for any chunking and number of cores."""
    size, device = rows[0].shape[0], rows[0].device
    total = torch.zeros(size, dtype=torch.float64, device=device)
    block = BLOCK if device.type == "cpu" else max(size, 1)  # what is converted then stays in a core's cache
    for start in range(0, size, block):
        columns = slice(start, start + block)
        for row, weight in zip(rows, weights, strict=True):
            total[columns].add_(row[columns], alpha=weight)
    return total
