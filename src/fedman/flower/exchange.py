"""Which vectors an algorithm has to send, found by playing it once on a model of one number.

A client reads part of the server's state (FedDC: θ and g, not h); only that part is sent. Of what a client uploads, the
server can compute all that follows from the client's model, the server's state and the hyper-parameters (FedDyn's drift
x_k − θ, say); only the rest is sent. A client can then not report a drift that does not fit its model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedman.algorithms import Algorithm, Local


@dataclass(frozen=True)
class Exchange:
    """The names of the vectors of a round."""

    down: tuple[str, ...]  # to a client
    up: tuple[str, ...]  # from it

    def numbers(self, size: int, keep_last: bool) -> tuple[int, int]:
        """How many numbers go down and up for one client, for a model of `size` parameters.

        With `keep_last` the upload of the client's round before comes up again, but in its first round.
        """
        return len(self.down) * size, (len(self.up) + keep_last) * size


class _Noted(Mapping[str, Tensor]):
    """Vectors that note which of them are read."""

    def __init__(self, vectors: Mapping[str, Tensor]) -> None:
        self.vectors, self.read = dict(vectors), {"w"}

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return self.vectors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.vectors)

    def __len__(self) -> int:
        return len(self.vectors)


def exchange(algorithm: Algorithm) -> Exchange:
    """What `algorithm` sends and receives in a round."""
    server = _Noted({name: torch.full((1,), 0.3) for name in algorithm.server})
    uploads = []
    for kept in (0.0, 0.7):  # with two memories: what changes with the memory must come from the client
        memory = {name: torch.full((1, 1), kept) for name in algorithm.client}
        scratch = {name: torch.zeros(1, 1) for name in algorithm.scratch}
        memory |= algorithm.begin(server, memory, _HP)
        algorithm.step(torch.full((1, 1), 0.5), torch.cos, server, {**memory, **scratch}, _HP)
        uploads.append(algorithm.finish(torch.full((1, 1), 0.2), server, memory, _HP)[1])
    down = tuple(name for name in algorithm.server if name in server.read)
    up = tuple(name for name in uploads[0] if name == "w" or not torch.equal(uploads[0][name], uploads[1][name]))
    return Exchange(down, up)


_HP = Local(
    lr=torch.tensor(0.1),
    lr0=0.1,
    decay=0.01,
    clip=1.0,
    p=torch.full((1, 1), 1.5),
    steps=torch.full((1, 1), 3.0),
    is_weight=torch.ones(1, dtype=torch.bool),
)
