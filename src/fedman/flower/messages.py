"""What travels between server and clients: names of records, arrays and fields. Arrays are plain ndarrays, never pickles.

A round, server to client k (`message_type` "train"):

| record | kind | holds |
| --- | --- | --- |
| `round` | ConfigRecord | `run`, `round`, `client`: which work this is; `relative_size`: p_k; `accepted`: the last round whose reply the server used, -1 if none; `settings`: the run's configuration; `task`: what the data must look like (both JSON) |
| `server` | ArrayRecord | the vectors `[P]` of the server that the algorithm reads on a client: always `w` |

and back:

| record | kind | holds |
| --- | --- | --- |
| `reply` | ConfigRecord | `run`, `round`, `client` as they came |
| `upload` | ArrayRecord | what the algorithm uploads, `[P]` each: always `w`; and `last`, the upload the server used before, where it keeps the mean of all clients |
| `figures` | MetricRecord | `loss`, and the MAN term of each layer, `man.LAYER` |

A client's weight is not among them: the server knows it. Before the first round, and to every node that comes later,
a question (`message_type` "query") with `round` alone; the answer is a ConfigRecord `node`: `client`, and `samples`,
the size of the client's own data, 0 where it takes its part of the run's public data set.

A client that cannot or will not work answers with a Flower error whose reason is one line.
"""  # noqa: E501 (tables)

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ROUND, SERVER = "round", "server"
REPLY, UPLOAD, FIGURES = "reply", "upload", "figures"
NODE = "node"
LAST = "last"
LAYER = "man."

REFUSED = 100
"""The code of a Flower error that carries a client's own reason."""


@dataclass(frozen=True)
class Task:
    """What a client's samples must look like, and how they are normalised: the server's, for everybody."""

    shape: tuple[int, ...]  # as the model sees a sample
    classes: int
    images: bool  # bytes, channels last
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool


@dataclass(frozen=True)
class Order:
    """The `round` record: one client's work in one round."""

    run: str
    round: int  # counted from 0
    client: int
    relative_size: float
    accepted: int
    settings: Mapping[str, Any]
    task: Task

    def fields(self) -> dict[str, str | int | float]:
        """The record's contents."""
        plain = {name: getattr(self, name) for name in ("run", "round", "client", "relative_size", "accepted")}
        return plain | {"settings": json.dumps(dict(self.settings)), "task": json.dumps(asdict(self.task))}

    @staticmethod
    def read(fields: Mapping[str, Any]) -> Order:
        """The order in a record. Raises KeyError, TypeError or ValueError where it is not one."""
        task = json.loads(fields["task"])
        task |= {name: tuple(task[name]) for name in ("shape", "mean", "std")}
        return Order(
            str(fields["run"]),
            int(fields["round"]),
            int(fields["client"]),
            float(fields["relative_size"]),
            int(fields["accepted"]),
            json.loads(fields["settings"]),
            Task(**task),
        )
