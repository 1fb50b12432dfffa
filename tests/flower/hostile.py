"""Hostile replies: what a hostile client sends in place of its own reply.

`app` is fedman's ClientApp for nodes with `hostile="FILE"` in their node config. The file says what the node does, in
lines `ROUND KIND` for one round (counted from 0), or a line with a kind for all rounds. A kind is one of `KINDS`;
`sleep SECONDS` for an honest reply that is late; `announce SECONDS` for one that is announced so long before it is
uploaded; `intrude HOST:PORT` for a further node at this SuperLink, which sends what nobody has asked it for, beside an
honest reply; `error` for an error with control characters in it; `forget` for the claim to have lost its memory.
Otherwise the node is honest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, Metadata, RecordDict
from flwr.app.message import array, make_message
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supernode.fleet_http_connection import http_request_response
from flwr.supernode.runtime import run_clientapp

from fedman.flower import client
from fedman.flower.messages import FIGURES, FORGOTTEN, REFUSED, REPLY, ROUND, UPLOAD


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
    "loss 3e38": with_figure("loss", 3e38),
}


GIANT = 300 * 2**20  # bytes


def giant(content: RecordDict) -> None:
    content.array_records[UPLOAD]["giant"] = Array(np.random.default_rng().integers(0, 256, GIANT, np.uint8))


def bomb(content: RecordDict) -> None:
    """An array whose bytes are all the same. Flower sends equal parts once: small ones take less than 100 KB in all."""
    array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE = 50_000  # a hostile client can do that
    content.array_records[UPLOAD]["w"] = Array("uint8", (GIANT,), "numpy.ndarray", bytes(GIANT))


GIANTS: dict[str, Callable[[RecordDict], None]] = {"giant array": giant, "array of repeated parts": bomb}
"""Replies that take memory, for tests that measure it."""


ERRORS = {
    "error": Error(REFUSED, "\x1b[2J\x1b[31mall is well\x07" + "!" * 10_000),
    "forget": Error(FORGOTTEN, "memory: is gone"),
}


def intrude(address: str, reply: Message) -> None:
    """As another node, send messages to the server that reply to nothing: in the name of each client with a lower
    number, one with a reply, and the announcement of one with more parts than a reply can have."""
    with http_request_response(address, insecure=True) as (_, _, send, _, _, _, push_object, _):
        for k in range(int(reply.content.config_records[REPLY]["client"])):
            for parts in (1, 2000):
                message = unasked(reply, k, parts)
                wanted, session = send(message, get_object_tree(message), 0.0)
                for name, part in get_all_nested_objects(message).items() if parts == 1 else ():
                    if name in wanted:
                        push_object(message.metadata.run_id, session, name, part.deflate())


def unasked(reply: Message, k: int, parts: int) -> Message:
    """A message to the server that replies to nothing, with what client k could send, in so many arrays."""
    upload = {str(i): Array(np.float32([i, k])) for i in range(1, parts)}
    upload |= {name: Array(v.numpy() + np.float32(0.001)) for name, v in reply.content.array_records[UPLOAD].items()}
    tag = {**reply.content.config_records[REPLY], "client": k}
    content = RecordDict({**dict(reply.content.items()), REPLY: ConfigRecord(tag), UPLOAD: ArrayRecord(upload)})
    about = reply.metadata
    metadata = Metadata(about.run_id, "", 1, 1, "", "", time.time(), about.ttl, about.message_type)
    message = make_message(metadata, content=content)
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def spoil(kind: str, reply: Message) -> Message:
    """A reply made hostile."""
    if reply.has_content():
        (KINDS | GIANTS)[kind](reply.content)
    return reply


app = ClientApp()
app.query()(client.introduce)


@app.train()
def train(message: Message, context: Context) -> Message:
    """fedman's reply, late or made hostile if the file says so."""
    kind = planned(Path(str(context.node_config["hostile"])), message.content.config_records[ROUND]["round"])
    if kind.startswith("sleep "):
        time.sleep(float(kind.removeprefix("sleep ")))
        kind = ""
    if kind.startswith("announce "):
        whole, seconds = run_clientapp.push_objects, float(kind.removeprefix("announce "))
        run_clientapp.push_objects = lambda *given, **named: (time.sleep(seconds), whole(*given, **named))
        kind = ""
    if kind in ERRORS:
        return Message(ERRORS[kind], reply_to=message)
    reply = client.train(message, context)
    if kind.startswith("intrude "):
        intrude(kind.removeprefix("intrude "), reply)
        kind = ""
    return spoil(kind, reply) if kind else reply


def planned(orders: Path, t: object) -> str:
    """What the file says about a round."""
    lines = orders.read_text().splitlines() if orders.exists() else []
    rounds = dict(line.split(" ", 1) for line in lines if line[0].isdigit())
    return rounds.get(str(t), next((line for line in lines if not line[0].isdigit()), ""))
