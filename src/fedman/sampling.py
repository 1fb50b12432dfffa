"""Every random choice of a run, as a pure function of (seed, round, client, epoch, sample).

Nothing here keeps a generator: cohorts come from a schedule, batch orders and augmentation from a hash that gives
the same numbers on every device, for any chunk of clients and after any restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedman.transfer import send


def cohort(t: int, clients: int, participation: float, kind: str = "bernoulli", seed: int = 0) -> list[int]:
    """The clients S_t of round t (counted from 0), ascending.

    "bernoulli": the paper's schedule, each client independently with probability `participation`, from numpy's
    legacy generator seeded with t + seed; an empty draw is repeated with the next seed.
    "fixed": exactly max(1, round(participation · clients)) clients, uniformly without replacement.
    """
    if kind == "fixed":
        size = max(1, round(participation * clients))
        return sorted(np.random.RandomState(t + seed).permutation(clients)[:size].tolist())
    while True:
        u = np.random.RandomState(t + seed).uniform(size=clients)
        active = np.flatnonzero(u <= participation)
        if len(active):
            return active.tolist()
        seed += 1


def _signed(u: int) -> int:
    return u - (1 << 64) if u >= 1 << 63 else u


_GOLDEN, _M1, _M2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical shift to the right (torch's own is arithmetic)."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def bits(*keys: Tensor | int, device: torch.device | None = None) -> Tensor:
    """63 random bits for every element of the broadcast keys: SplitMix64's finaliser, once per key."""
    x = torch.zeros((), dtype=torch.int64, device=device)
    for key in keys:
        x = (x ^ key) + _GOLDEN
        x = (x ^ _shift(x, 30)) * _M1
        x = (x ^ _shift(x, 27)) * _M2
        x = x ^ _shift(x, 31)
    return _shift(x, 1)


@dataclass(frozen=True)
class Plan:
    """What S clients see in one round: K steps of B samples. Shorter clients and batches are padded."""

    sample: Tensor  # [S, K, B] positions among the client's own samples
    window: Tensor  # [3, S, K, B] mirrored or not, and the offsets (down, right) of the crop in the padded image
    weight: Tensor | None  # [S, K, B] share of a sample in its batch's mean, 0 for padding; None: all batches full
    counts: list[list[int]]  # [S][K] samples in each batch, 0 where a client has finished
    longest: int  # samples of the largest client

    @property
    def steps(self) -> list[int]:
        """K_k, the number of steps of each client."""
        return [sum(n > 0 for n in row) for row in self.counts]


def batch_counts(size: int, epochs: int, batch_size: int) -> list[int]:
    """The number of samples in each local step of a client with `size` samples; the last of an epoch may be
    smaller."""
    full, rest = divmod(size, batch_size)
    return ([batch_size] * full + [rest] * (rest > 0)) * epochs


def plan(
    seed: int,
    t: int,
    clients: Sequence[int],
    sizes: Sequence[int],
    epochs: int,
    batch_size: int,
    device: torch.device,
    pad: int = 0,
    longest: int | None = None,
) -> Plan:
    """The batches of round t: a fresh permutation of a client's samples every epoch, cut into batches.

    With `pad` > 0 every sample gets, per epoch: a mirror image with probability ½; and with probability ½ (apart
    from that) a crop of the zero-padded image at offsets uniform on {0, …, 2·pad}, otherwise the centre.
    With `longest` the plan has the shape it would have for a client of so many samples.
    """
    counts = [batch_counts(n, epochs, batch_size) for n in sizes]
    longest = longest or max(sizes)
    steps = len(batch_counts(longest, epochs, batch_size))
    batch = min(batch_size, longest)
    ragged = any(n != batch for row in counts for n in row) or len(set(map(len, counts))) > 1
    counts = [row + [0] * (steps - len(row)) for row in counts]

    client = send(clients, device)[:, None, None]
    size = send(sizes, device)[:, None, None]
    epoch = torch.arange(epochs, device=device)[None, :, None]
    position = torch.arange(longest, device=device)
    key = bits(seed, t, client, epoch, position, device=device)
    order = key.masked_fill(position >= size, torch.iinfo(torch.int64).max).argsort(dim=-1)  # [S, E, n]

    step = torch.arange(steps, device=device)[None, :, None]
    per_epoch = (size + batch_size - 1) // batch_size
    at = step % per_epoch * batch_size + torch.arange(batch, device=device)  # [S, K, B]
    real = (at < size) & (step < epochs * per_epoch)
    at = at.clamp(max=longest - 1)
    of_epoch = (step // per_epoch).clamp(max=epochs - 1)
    sample = order.flatten(1).gather(1, (of_epoch * longest + at).flatten(1)).view_as(at)

    draw = bits(seed, ~t, client, of_epoch, sample, device=device)
    offset = torch.stack([_shift(draw, 2) % (2 * pad + 1), _shift(draw, 32) % (2 * pad + 1)])
    crop = (draw & 2).bool()
    mirror = (draw & 1) if pad else torch.zeros_like(draw)
    window = torch.cat([mirror[None], torch.where(crop, offset, pad)])
    weight = real.double() / real.sum(-1, keepdim=True).clamp(min=1) if ragged else None
    return Plan(sample, window, weight, counts, longest)
