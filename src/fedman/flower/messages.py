"""What travels between server and clients: names of records, arrays and fields.

A round, server to client k (message type "train"):

- `round`, a ConfigRecord, the fields of `Order`;
- `server`, an ArrayRecord: the server's vectors that the algorithm reads on a client, `[P]` each, always `w`; and
  `model.buffers` `[Q]`, where the model has buffers such as running statistics.

And back:

- `reply`, a ConfigRecord: `run`, `round`, `client` as they came;
- `upload`, an ArrayRecord: the client's model `w`, `[P]`, and what else the server cannot compute from it
  (`fedman.flower.exchange`); its `model.buffers`;
- `figures`, a MetricRecord: `loss`, and the terms of the penalty as `penalty.NAME`.

A client's weight is not among them: the server knows it. Every node is asked once who it is (message type "query",
with `round` alone); the answer is `node`, a ConfigRecord: `client`, and `samples`, the size of the client's own data, 0
where it takes its part of the run's public data set. A client that cannot or will not work answers with a Flower error
whose reason is one line, and with the code `FORGOTTEN` if it no longer has what it must remember. Arrays are plain
ndarrays in numpy's own format, never pickles.
"""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

ROUND, SERVER = "round", "server"
REPLY, UPLOAD, FIGURES = "reply", "upload", "figures"
NODE = "node"
TERM = "penalty."

REFUSED, UNREADABLE, FORGOTTEN = 100, 101, 102
"""Codes of Flower errors: a client's own reason, a reply that the server cannot unpack, a client's lost memory."""


@dataclass(frozen=True)
class SampleKind:
    """What a client's samples must look like, and how they are normalised: the server's, for everybody."""

    shape: tuple[int, ...]  # as the model sees a sample
    classes: int
    images: bool  # bytes, channels last
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Order:
    """One client's work in one round."""

    run: str  # 32 hexadecimal digits
    round: int  # counted from 0
    client: int
    relative_size: float  # p_k
    accepted: int  # the last round whose reply the server used, and whose memory counts; -1: start without a memory
    settings: str  # the run's configuration, JSON
    samples: str  # the fields of a `SampleKind`, JSON

    @property
    def tag(self) -> dict[str, str | int]:
        """What the reply repeats."""
        return {"run": self.run, "round": self.round, "client": self.client}
