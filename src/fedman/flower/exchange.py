"""Which vectors an algorithm has to send, found by playing it once on a model of one number.

A client reads part of the server's state; only that part is sent. Of what a client uploads, the server can compute all
that follows from the client's model, the server's state and the hyper-parameters; only the rest is sent. A client can
then not report a change of its memory that does not fit its model.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from fedman.algorithms import Algorithm
from fedman.training.check_parts import trial
from fedman.training.settings import BUFFERS


@dataclass(frozen=True)
class Exchange:
    """The names of the vectors of a round."""

    down: tuple[str, ...]  # to a client
    up: tuple[str, ...]  # from it


def exchange(algorithm: Algorithm, buffers: bool = False, local: bool = False) -> Exchange:
    """What `algorithm` sends and receives in a round; with the models' `buffers`, if they have any.

    Where clients keep parts of their models (`local`), the server does not know what they started from, and nothing
    that they upload follows from their models.
    """
    server = defaultdict(lambda: torch.full((1,), 0.3), w=torch.full((1,), 0.3))  # holds what has been read
    uploads, hp = [], trial(1, 1)
    for kept in (0.0, 0.7):  # with two memories: what changes with the memory must come from the client
        names = (*algorithm.client, *algorithm.scratch)
        vectors = {name: torch.full((1, 1), kept * i) for i, name in enumerate(names, 1)}  # so do differences
        memory = {**algorithm.begin(server, {name: vectors[name] for name in algorithm.client}, hp), **vectors}
        algorithm.step(torch.full((1, 1), 0.5), torch.cos, server, memory, hp)
        uploads.append(algorithm.finish(torch.full((1, 1), 0.2), server, memory, hp)[1])
    down = tuple(name for name in algorithm.server if name in server)
    told = {name for name in uploads[0] if local or name == "w" or not torch.equal(*(u[name] for u in uploads))}
    more = (BUFFERS,) if buffers else ()
    return Exchange((*down, *more), (*(name for name in uploads[0] if name in told), *more))
