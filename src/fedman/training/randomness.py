"""Every random choice of a run, as a pure function of (seed, round, client, epoch or step, sample).

Nothing here keeps a generator: cohorts come from a schedule, batch orders, augmentation and the keys of dropout from a
hash that gives the same numbers on every device, for any chunk of clients and after any restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedman.execution.hashing import bits, shift
from fedman.execution.transfer import send


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


MASKS = 0x4D41534B53  # tells the keys of dropout from the draws of batches


@dataclass(frozen=True)
class Plan:
    """What S clients see in one round: K steps of B samples. Shorter clients and batches are padded."""

    sample: Tensor  # [S, K, B] positions among the client's own samples
    window: Tensor  # [3, S, K, B] mirrored or not, and the offsets (down, right) of the crop in the padded image
    weight: Tensor | None  # [S, K, B] share of a sample in its batch's mean, 0 for padding; None: all batches full
    key: Tensor  # [S, K] from which the random numbers of a step's forward pass come
    counts: list[list[int]]  # [S][K] samples in each batch, 0 where a client has finished
    steps: list[int]  # K_k, the number of steps of each client
    longest: int  # samples of the largest client


def batch_counts(size: int, epochs: int, batch_size: int) -> list[int]:
    """The number of samples in each local step of a client with `size` samples; the last of an epoch may be
    smaller."""
    full, rest = divmod(size, batch_size)
    return ([batch_size] * full + [rest] * (rest > 0)) * epochs


@dataclass(frozen=True)
class _Cut:
    """How a client of some size cuts its epochs into batches, whatever the order of its samples."""

    steps: int
    counts: list[int]  # [K], 0 after its last step
    full: bool  # all its batches are
    epoch: Tensor  # [K, 1] on the host
    place: Tensor  # [K, B] among the samples of all epochs, one epoch after the other
    weight: Tensor  # [K, B]
    beyond: Tensor  # [n]: positions that it does not have


@lru_cache(maxsize=256)
def _cut(size: int, epochs: int, batch_size: int, longest: int, device: torch.device) -> _Cut:
    """In the shape of the cut of a client of `longest` samples. A client is cut alike in every round."""
    counts = batch_counts(size, epochs, batch_size)
    steps, most = len(counts), len(batch_counts(longest, epochs, batch_size))
    step, per_epoch, batch = torch.arange(most)[:, None], -(-size // batch_size), min(batch_size, longest)
    epoch = (step // per_epoch).clamp(max=epochs - 1)
    at = step % per_epoch * batch_size + torch.arange(batch)
    real = (at < size) & (step < steps)
    return _Cut(
        steps=steps,
        counts=counts + [0] * (most - steps),
        full=set(counts) == {batch},
        epoch=epoch,
        place=send(epoch * longest + at.clamp(max=longest - 1), device),
        weight=send(real.double() / real.sum(-1, keepdim=True).clamp(min=1), device),
        beyond=send(torch.arange(longest) >= size, device),
    )


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
    longest = longest or max(sizes)
    cuts = [_cut(n, epochs, batch_size, longest, device) for n in sizes]
    steps = [cut.steps for cut in cuts]
    client = torch.tensor(clients)[:, None, None]
    key = bits(seed, t, client, torch.arange(epochs)[None, :, None], torch.arange(longest, device=device))
    if min(sizes) < longest:
        key = key.masked_fill(torch.stack([cut.beyond for cut in cuts])[:, None], torch.iinfo(torch.int64).max)
    place = torch.stack([cut.place for cut in cuts])
    sample = key.argsort(dim=-1).flatten(1).gather(1, place.flatten(1)).view_as(place)  # keys [S, E, n]

    draw = bits(seed, ~t, client, torch.stack([cut.epoch for cut in cuts]), sample)
    offset = torch.stack([shift(draw, 2), shift(draw, 32)]) % (2 * pad + 1)
    mirror = (draw & 1) if pad else torch.zeros_like(draw)
    window = torch.cat([mirror[None], torch.where((draw & 2).bool(), offset, pad)])

    full = len(set(steps)) == 1 and all(cut.full for cut in cuts)
    weight = None if full else torch.stack([cut.weight for cut in cuts])
    keys = send(bits(seed, MASKS, t, client[:, 0], torch.arange(place.shape[1])), device)
    return Plan(sample, window, weight, keys, [cut.counts for cut in cuts], steps, longest)
