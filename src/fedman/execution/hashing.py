"""Random bits as a hash of keys: no generator, the same bits on every device.

Plain tensor operations, which vmap, CUDA graphs and torch.compile can do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedman.execution.transfer import send


def _signed(u: int) -> int:
    return u - (1 << 64) if u >= 1 << 63 else u


_GOLDEN, _M1, _M2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_ODD = tuple(_signed(pow(0xD1342543DE82EF95, 2 * d + 1, 1 << 64)) for d in range(16))  # one for every dimension


def shift(x: Tensor, n: int) -> Tensor:
    """Logical shift to the right (torch's own is arithmetic)."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def mix(x: Tensor, key: Tensor | int) -> Tensor:
    """64 random bits of every element of x and the key: SplitMix64's finaliser."""
    x = (x ^ key) + _GOLDEN
    x = (x ^ shift(x, 30)) * _M1
    x = (x ^ shift(x, 27)) * _M2
    return x ^ shift(x, 31)


def bits(*keys: Tensor | int) -> Tensor:
    """63 random bits for every element of the broadcast keys, mixed in one after the other.

    Leading keys on the host are mixed there, and the result is sent to the device of the first key that is on one: a
    dozen small kernels a key would fill a GPU's queue, and a host that finds it full waits.
    """
    x = torch.zeros((), dtype=torch.int64)
    for key in keys:
        if isinstance(key, Tensor) and key.device != x.device:
            x = send(x, key.device)
        x = mix(x, key)
    return shift(x, 1)


def positions(shape: Sequence[int], device: torch.device) -> Tensor:
    """A number for every entry of a tensor of this shape, from its coordinates alone: the entry (i, j) has the same one
    in a tensor with more rows or columns."""
    place = torch.zeros((), dtype=torch.int64, device=device)
    for d, n in reversed(list(enumerate(shape))):  # the first dimension last: what is added before is small
        along = torch.arange(n, device=device) * _ODD[d]
        place = place + along.view(-1, *[1] * (len(shape) - 1 - d))
    return place
