"""`Screened`: any of Flower's strategies, with clients' replies screened before they are aggregated.

    strategy = Screened(FedAvg(fraction_train=0.5), examples={node: samples, ...})

Flower's strategies average whatever they receive: one NaN makes the model NaN, a client that claims a `num-examples` of
1e30 replaces the model by its own, an array of shape (1,) is broadcast, other names end the run. `Screened` passes on
the good replies only, sorted by node id, so that the result does not depend on the order of arrival, and with the
weights that the server knows in place of those that clients claim.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import Result, Strategy

from fedman.errors import UserError
from fedman.flower.incoming_reply import largest_reply
from fedman.flower.replies import POLL_INTERVAL, PendingReplies
from fedman.flower.screen import (
    FACTOR,
    LARGEST,
    VARIANCE,
    Refused,
    contents,
    distance,
    outliers,
    read_arrays,
    refuse_negative,
)

TAGGED, TAG = "fedman", "tag"
"""The record and the field that hold a round's tag, in the message and in its reply (`fedman.flower.man_mod`)."""


class Screened(Strategy):
    """A strategy that receives screened replies only.

    - `examples`: the number of samples of each node, by node id; by default all nodes have the same weight. What a
      client claims is never used.
    - `norm_factor`: the largest distance of a reply from the model that was sent, in medians of the round
      (`screen.FACTOR`); `inf` for no bound.
    - `min_replies`: with fewer good replies the run ends with Flower's exit code 202.
    - `tagged`: refuse replies without the tag of their round, which clients with `man_mod` return.

    `refused` holds the reasons by round and node.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        examples: Mapping[int, int] | None = None,
        norm_factor: float = FACTOR,
        min_replies: int = 1,
        tagged: bool = True,
    ) -> None:
        if examples is not None and not all(type(n) is int and n >= 1 for n in examples.values()):
            raise UserError(f"examples: {dict(examples)!r:.80} are not numbers of samples of at least 1")
        if not norm_factor > 1:
            raise UserError(f"norm_factor: {norm_factor!r} is not above 1")
        self.strategy, self.examples, self.norm_factor = strategy, examples, norm_factor
        self.min_replies, self.tagged, self.run = min_replies, tagged, uuid.uuid4().hex
        self.weight = getattr(strategy, "weighted_by_key", "num-examples")
        self.refused: dict[int, dict[int, str]] = {}
        self._sent: list[Message] = []
        self._model: ArrayRecord = ArrayRecord()
        self._tag = ""

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """As `Strategy.start`, but a reply that is too large or cannot be unpacked is refused, and the run goes on."""
        return super().start(_TolerantGrid(grid), *args, **kwargs)  # type: ignore[arg-type]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's messages, tagged."""
        self._model = arrays
        return self._tagged(server_round, self.strategy.configure_train(server_round, arrays, config, grid))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's messages, tagged."""
        return self._tagged(server_round, self.strategy.configure_evaluate(server_round, arrays, config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's aggregate of the good replies."""
        return self.strategy.aggregate_train(server_round, self._good(server_round, replies, with_arrays=True))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The strategy's aggregate of the good replies."""
        return self.strategy.aggregate_evaluate(server_round, self._good(server_round, replies, with_arrays=False))

    def summary(self) -> None:
        """Log the strategy's configuration."""
        self.strategy.summary()

    def _tagged(self, server_round: int, messages: Iterable[Message]) -> list[Message]:
        self._sent, self._tag = list(messages), f"{self.run}:{server_round}"
        for message in self._sent:
            message.content[TAGGED] = ConfigRecord({TAG: self._tag})
        return self._sent

    def _good(self, server_round: int, replies: Iterable[Message], with_arrays: bool) -> list[Message]:
        """The replies that pass, sorted by node id, each with the weight of its node."""
        nodes = {message.metadata.message_id: message.metadata.dst_node_id for message in self._sent}
        received = {nodes.get(reply.metadata.reply_to_message_id): reply for reply in replies}
        moved: dict[int, float] = {}
        refused: dict[int, str] = {}
        for node in sorted(nodes.values()):
            try:
                if node not in received:
                    raise Refused("no reply in time")
                content = self._content(received[node], node)
                moved[node] = self._distance(content) if with_arrays else 0.0
            except Refused as error:
                refused[node] = str(error)
        refused |= outliers(moved, self.norm_factor)
        refused |= _odd_names({node: received[node] for node in moved if node not in refused})
        for node, reason in refused.items():
            log(WARNING, "round %s: node %s refused: %s", server_round, node, reason)
        self.refused.setdefault(server_round, {}).update(refused)
        kept = [node for node in moved if node not in refused]
        if nodes and len(kept) < self.min_replies:
            why = "; ".join(f"node {node}: {reason}" for node, reason in list(refused.items())[:3])
            raise AggregationError(
                f"round {server_round}: {len(kept)} good replies of {len(nodes)}, {self.min_replies} are needed; {why}"
            )
        return [received[node] for node in kept]

    def _content(self, reply: Message, node: int) -> RecordDict:
        """A reply's records, with finite metrics and the weight replaced by the one the server knows."""
        content = contents(reply)
        said = content.config_records.pop(TAGGED, ConfigRecord()).get(TAG)
        if self.tagged and said != self._tag:
            raise Refused(f"{TAG}: {said!r:.60} is not this round's; the ClientApp needs man_mod, or use tagged=False")
        metrics = list(content.metric_records.values())
        if len(metrics) != 1:
            raise Refused(f"reply: has {len(metrics)} records of metrics; wanted is one")
        for name, value in metrics[0].items():
            if not (np.abs(np.asarray(value, np.float64)) <= LARGEST).all():
                raise Refused(f"{name!r:.40}: {value!r:.40} is not finite within ±{LARGEST:.3g}")
        if self.examples is not None and node not in self.examples:
            raise Refused("examples: the server does not know how many samples this node has")
        metrics[0][self.weight] = 1 if self.examples is None else self.examples[node]
        return content

    def _distance(self, content: RecordDict) -> float:
        """The distance of a reply's model from the one sent, whose names, shapes and dtypes it must have.

        Whole numbers do not count: those of batches in batch-norm would outweigh all else, and honest ones differ more.
        """
        if len(content.array_records) != 1:
            raise Refused(f"reply: has {len(content.array_records)} records of arrays; wanted is one")
        shapes = {name: (tuple(array.shape), array.dtype) for name, array in self._model.items()}
        arrays = read_arrays(content, next(iter(content.array_records)), shapes)
        for name, array in arrays.items():
            if name.endswith(VARIANCE):
                refuse_negative(name, array)
        moved = (distance(v, self._model[name].numpy()) for name, v in arrays.items() if v.dtype.kind in "fc")
        return math.hypot(*moved)


class _TolerantGrid:
    """A grid for which a reply that cannot be unpacked is an error of its sender, and so is one larger than the arrays
    that were sent: see `PendingReplies`."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send the messages and wait until all replies have arrived or the time is over."""
        sent = dict(enumerate(messages))
        limit = max((largest_reply(_sizes(message)) for message in sent.values()), default=0)
        pending = PendingReplies(self.grid, limit)
        pending.send(sent)
        replies, end = list[Message](), time.monotonic() + (math.inf if timeout is None else timeout)
        while pending.waiting and time.monotonic() < end:
            replies += pending.arrived().values()
            if pending.waiting:
                time.sleep(POLL_INTERVAL)
        return replies


def _sizes(message: Message) -> list[int]:
    """The bytes of each array in a message."""
    return [len(array.data) for record in message.content.array_records.values() for array in record.values()]


def _odd_names(replies: Mapping[int, Message]) -> dict[int, str]:
    """The replies whose metrics have other names than most replies'; in a tie the first node's names win."""
    names = {node: tuple(sorted(*reply.content.metric_records.values())) for node, reply in replies.items()}
    return {
        node: f"metrics: has {', '.join(found)!r:.120}; most replies have {', '.join(usual)!r:.120}"
        for usual, _ in Counter(names.values()).most_common(1)
        for node, found in names.items()
        if found != usual
    }
