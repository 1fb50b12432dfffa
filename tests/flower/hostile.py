"""Hostile replies: what a hostile client sends in place of its own reply.

`app` is fedman's ClientApp for nodes with `hostile="FILE"` in their node config. The content of the file at the
beginning of a round decides what the node does: it sends one of `KINDS`, or with `sleep SECONDS` an honest reply late;
an empty file, or none, stands for an honest reply.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedman.flower import client
from fedman.flower.messages import FIGURES, REPLY, UPLOAD


def with_w(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[RecordDict], None]:
    """The model, changed."""

    def spoil(content: RecordDict) -> None:
        content.array_records[UPLOAD]["w"] = Array(change(content.array_records[UPLOAD]["w"].numpy()))

    return spoil


def with_figure(name: str, value: float) -> Callable[[RecordDict], None]:
    def spoil(content: RecordDict) -> None:
        content.metric_records[FIGURES][name] = value

    return spoil


def first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    """The same numbers but for the first."""
    return lambda w: np.concatenate([np.array([value], w.dtype), w[1:]])


def missing(content: RecordDict) -> None:
    del content.array_records[UPLOAD]["w"]


def extra(content: RecordDict) -> None:
    content.array_records[UPLOAD]["v"] = content.array_records[UPLOAD]["w"]


def garbage(content: RecordDict) -> None:
    w = content.array_records[UPLOAD]["w"]
    content.array_records[UPLOAD]["w"] = Array(w.dtype, w.shape, w.stype, bytes(range(256)) * (len(w.data) // 256 + 1))


def replay(content: RecordDict) -> None:
    content.config_records[REPLY]["round"] -= 1


def empty(content: RecordDict) -> None:
    content.clear()


KINDS: dict[str, Callable[[RecordDict], None]] = {
    "NaN": with_w(first(np.nan)),
    "Inf": with_w(first(np.inf)),
    "huge norm": with_w(lambda w: w * np.float32(1e6)),
    "wrong shape": with_w(lambda w: w[:1]),
    "wrong dtype": with_w(lambda w: w.astype(np.float64 if w.dtype == np.float32 else np.float32)),
    "missing array": missing,
    "extra array": extra,
    "weight 1e30": with_figure("num-examples", 1e30),
    "weight negative": with_figure("num-examples", -7.0),
    "weight zero": with_figure("num-examples", 0.0),
    "garbage bytes": garbage,
    "replay": replay,
    "empty reply": empty,
}


def spoil(kind: str, reply: Message) -> Message:
    """A reply made hostile."""
    if reply.has_content():
        KINDS[kind](reply.content)
    return reply


app = ClientApp()
app.query()(client.introduce)


@app.train()
def train(message: Message, context: Context) -> Message:
    """fedman's reply, late or made hostile if the file says so."""
    orders = Path(str(context.node_config["hostile"]))
    kind = orders.read_text() if orders.exists() else ""
    if kind.startswith("sleep "):
        time.sleep(float(kind.removeprefix("sleep ")))
    reply = client.train(message, context)
    return spoil(kind, reply) if kind in KINDS else reply
