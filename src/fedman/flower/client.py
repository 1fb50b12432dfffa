"""The client: `app` is a Flower ClientApp that does one client's work of a round.

In a deployment every message may start a new process, so torch is imported only where a round needs it; in a simulation
the process stays, and with it what `fedman.flower.worker` has prepared.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from pydantic import ValidationError

from fedman.config import format_errors
from fedman.errors import UserError
from fedman.flower import client_data
from fedman.flower.messages import FIGURES, FORGOTTEN, NODE, REFUSED, REPLY, ROUND, UPLOAD, Order
from fedman.flower.node import Node

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Say which client this node is, and how many samples of its own it has."""
    try:
        node = Node.of(context)
        samples = client_data.count(Path(node.data).expanduser()) if node.data else 0
        answer = ConfigRecord({"client": node.client, "samples": samples})
    except UserError as error:
        return Message(Error(REFUSED, str(error)), reply_to=message)
    return Message(RecordDict({NODE: answer}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do one client's work of a round."""
    from fedman.flower import worker
    from fedman.flower.client_memory import Forgotten

    try:
        node = Node.of(context)
        order = Order(**message.content.config_records.get(ROUND, {}))  # type: ignore[arg-type]
        if order.client != node.client:
            raise UserError(f"partition-id: this node is client {node.client}, the order is for {order.client}")
        upload, figures = worker.work(order, node, message.content)
    except ValidationError as error:
        wrong = next(iter(format_errors(error).values()))
        reason = f"round: the message is not an order of this program ({wrong})"
        return Message(Error(REFUSED, reason), reply_to=message)
    except UserError as error:
        code = FORGOTTEN if isinstance(error, Forgotten) else REFUSED
        return Message(Error(code, str(error)), reply_to=message)
    answer: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        REPLY: ConfigRecord({**order.tag}),
        UPLOAD: ArrayRecord({name: Array(v) for name, v in upload.items()}),
        FIGURES: MetricRecord(dict(figures)),
    }
    return Message(RecordDict(answer), reply_to=message)
