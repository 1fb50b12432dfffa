"""Where the outputs of recurrent layers have their samples: first, second (time first), or packed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

CELLS = (nn.RNNCellBase,)
RECURRENT = (nn.RNNBase, *CELLS)


def samples_first(module: nn.Module | None, out: Tensor) -> bool:
    """Whether the first axis of a module's output is that of its samples; not so where it is that of time."""
    return not isinstance(module, nn.RNNBase) or module.batch_first or out.ndim != 3


def by_samples(packed: PackedSequence, rows: Tensor) -> Tensor:
    """Values of a packed sequence's rows, each its share in the mean of all rows, as shares of the samples `[B]`.

    A sample's value is the mean over its own steps and its share 1/B, whatever its length.
    """
    sizes = packed.batch_sizes.tolist()  # samples that have a step t; longest first
    place = torch.cat([torch.arange(n, device=rows.device) for n in sizes])
    lengths = torch.bincount(place)
    sums = rows.new_zeros(sizes[0]).index_add(0, place, rows)
    shares = sums * (len(place) / sizes[0]) / lengths
    return shares if packed.unsorted_indices is None else shares[packed.unsorted_indices]
