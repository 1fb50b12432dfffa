"""MAN for an existing Flower app: a mod for the ClientApp and a wrapper for its loss.

    app = ClientApp(mods=[man_mod])                     # receives ζ from the server, reports the MAN term
    ...
    criterion = with_man(nn.CrossEntropyLoss(), model)  # loss + ζ·R(model), where gradients are enabled

The server sends ζ in the training config, `train_config=ConfigRecord({"zeta": 0.15})`, and finds each client's MAN
term, its mean over batches, among the metrics as `man`. `man_mod` also returns the server's tag of the round, which
`fedman.flower.Screened` checks. `with_man(criterion, model, zeta=0.15)` needs no mod.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.flower.strategy import TAG, TAGGED
from fedman.penalties.man import ActivationNorm, Layers

ZETA, MAN = "zeta", "man"


@dataclass
class _Round:
    """The state of the message that is being processed."""

    zeta: float | None
    terms: list[Tensor] = field(default_factory=list)


_round: ContextVar[_Round | None] = ContextVar("round", default=None)


def man_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A Flower mod: passes ζ from the message to `with_man`, and adds the mean MAN term to the reply's metrics."""
    sent = [record[ZETA] for record in message.content.config_records.values() if ZETA in record]
    now = _Round(_zeta(sent[0]) if sent else None)
    token = _round.set(now)
    try:
        reply = call_next(message, context)
    finally:
        _round.reset(token)
    if reply.has_content():
        if now.terms:
            records = reply.content.metric_records
            metrics = records.setdefault(next(iter(records), "metrics"), MetricRecord())
            metrics[MAN] = torch.stack(now.terms).double().mean().item()
        if TAGGED in message.content.config_records:
            reply.content[TAGGED] = ConfigRecord({TAG: message.content.config_records[TAGGED][TAG]})
    return reply


def with_man(
    criterion: Callable[..., Tensor],
    model: nn.Module,
    zeta: float | None = None,
    *,
    layers: Layers = None,
    output: bool = True,
) -> Callable[..., Tensor]:
    """`criterion` plus ζ·R, where R is the MAN term of the model's last forward pass; see `ActivationNorm`.

    Where gradients are disabled (evaluation), and for ζ = 0, the result is that of `criterion`, bit for bit. By default
    ζ is the one that the server sent.
    """
    now = _round.get()
    if zeta is None and now is not None:
        zeta = now.zeta
    if zeta is None:
        raise UserError(
            'zeta: not given; with_man(..., zeta=0.15), or man_mod and the server\'s train_config {"zeta": …}'
        )
    weight, man = _zeta(zeta), ActivationNorm(model, layers, output=output)

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        plain = criterion(*args, **kwargs)
        if not torch.is_grad_enabled():
            return plain
        term = man()
        if now is not None:
            now.terms.append(term.detach())
        return plain + weight * term if weight else plain

    return loss


def _zeta(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise UserError(f"zeta: {value!r:.40} is not a finite number of at least 0")
    return float(value)
