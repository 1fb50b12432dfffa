"""Samples on the device, and the batches a chunk of clients draws from them in a round."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedman.data.augment import Windows, channels_first, gather, normalise
from fedman.sampling import Plan

Batch = tuple[Tensor, Tensor, Tensor | None]
"""Inputs `[S, B, ...]`, labels `[S, B]`, and the samples' shares in their batch's mean (None: equal)."""


@dataclass(frozen=True)
class Samples:
    """Training and test samples on the device, and which training samples are whose."""

    x: Tensor  # bytes [n, H, W, C], or a user's own numbers [n, ...]
    y: Tensor  # [n]
    x_test: Tensor
    y_test: Tensor
    parts: list[Tensor]  # the indices of each client's samples
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool

    @property
    def images(self) -> bool:
        """Whether samples are bytes of images, channels last."""
        return self.x.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """A sample's shape as the model sees it."""
        shape = self.x.shape[1:]
        return (shape[-1], *shape[:-1]) if self.images else tuple(shape)

    @property
    def longest(self) -> int:
        """The samples of the largest client."""
        return max(map(len, self.parts))

    def sizes(self, clients: Sequence[int]) -> list[int]:
        return [len(self.parts[k]) for k in clients]

    def index(self, clients: Sequence[int]) -> Tensor:
        """`[S, n]`: where the clients' samples are, the shorter clients padded."""
        return nn.utils.rnn.pad_sequence([self.parts[k] for k in clients], batch_first=True)

    def test(self, lo: int, hi: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A slice of the normalised test set, images with their channels first."""
        x = normalise(self.x_test[lo:hi], self.mean, self.std, dtype)
        return channels_first(x) if self.images else x, self.y_test[lo:hi]


class Batches:
    """The batches of a chunk of clients, step by step."""

    def __init__(self, samples: Samples, clients: Sequence[int], plan: Plan, dtype: torch.dtype) -> None:
        self.samples, self.dtype, self.counts = samples, dtype, plan.counts
        self.steps = plan.sample.shape[1]
        tensors = {"index": samples.index(clients), "sample": plan.sample, "window": plan.window}
        if plan.weight is not None:
            tensors["weight"] = plan.weight.to(dtype)
        if len(set(plan.steps)) > 1:
            tensors["active"] = torch.tensor(plan.counts, device=plan.sample.device) > 0
        self.tensors: dict[str, Tensor] = tensors  # what differs from round to round
        self._windows: Windows | None = None

    def over(self, tensors: Mapping[str, Tensor]) -> Batches:
        """The same batches, read from other tensors of the same shapes."""
        if tensors is self.tensors:
            return self
        other = copy.copy(self)
        other.tensors = dict(tensors)
        return other

    def active(self, j: int | Tensor) -> Tensor | None:
        """`[S, 1]`: whether a client still has a step to take; None when all take the same number."""
        return _at(self.tensors["active"], 1, j)[:, None] if "active" in self.tensors else None

    def at(self, j: int | Tensor) -> Batch:
        """Step j; a tensor `[1]` in a captured graph."""
        sample, window = _at(self.tensors["sample"], 1, j), _at(self.tensors["window"], 2, j)
        weight = _at(self.tensors["weight"], 1, j) if "weight" in self.tensors else None
        if weight is not None and len(sample) == 1 and isinstance(j, int):  # one client alone needs no padding
            n = self.counts[0][j]
            sample, window, weight = sample[:, :n], window[:, :, :n], None
        where = self.tensors["index"].gather(1, sample)
        return self._inputs(sample, where, window), self.samples.y[where], weight

    def _inputs(self, sample: Tensor, where: Tensor, window: Tensor) -> Tensor:
        data = self.samples
        if where.is_cuda and data.images:
            return channels_first(
                gather(data.x, where, window if data.augment else None, data.mean, data.std, self.dtype)
            )
        if self._windows is None:
            x = normalise(data.x[self.tensors["index"]], data.mean, data.std, self.dtype)
            self._windows = Windows(x, data.images, data.augment)
        return self._windows.take(sample, window)


def _at(v: Tensor, dim: int, j: int | Tensor) -> Tensor:
    return v.select(dim, j) if isinstance(j, int) else v.index_select(dim, j).squeeze(dim)
