"""Masks of dropout computed apart: SplitMix64 in numpy's unsigned integers."""

import numpy as np

ODD = [pow(0xD1342543DE82EF95, 2 * d + 1, 1 << 64) for d in range(4)]


def mixed(x, key):
    """64 bits from two of them."""
    with np.errstate(over="ignore"):
        x = (np.uint64(x) ^ np.asarray(key).astype(np.int64).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def step_key(seed, t, client, step):
    """The key of a client's step."""
    x = np.uint64(0)
    for key in (seed, 0x4D41534B53, t, client, step):
        x = mixed(x, key)
    return int(x >> np.uint64(1))


def kept(key, call, shape, p):
    """1 where an entry is kept in the `call`-th random tensor of a pass, 0 elsewhere."""
    with np.errstate(over="ignore"):
        place = sum(
            np.arange(n, dtype=np.uint64).reshape(-1, *[1] * (len(shape) - 1 - d)) * np.uint64(ODD[d])
            for d, n in enumerate(shape)
        )
        stream = mixed(np.int64(key).astype(np.uint64), call)
        x = (stream ^ place) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = (x ^ (x >> np.uint64(31))) >> np.uint64(1)
    return (x >= np.uint64(int(p * 2.0**63))).astype(float)
