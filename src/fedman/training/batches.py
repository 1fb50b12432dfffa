"""Samples on the device, and the batches a chunk of clients draws from them in a round."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedman.data.augment import PAD, Windows, affine, channels_first, gather, normalise
from fedman.data.images import holds_images, sample_shape
from fedman.execution.base import Batch, ImageLayout
from fedman.execution.transfer import send
from fedman.training.randomness import Plan


@dataclass(frozen=True)
class Samples:
    """Training and test samples on the device, and which training samples are whose."""

    x: Tensor  # bytes [n, H, W, C], a user's own numbers or ids [n, ...]
    y: Tensor  # [n, ...]
    x_test: Tensor
    y_test: Tensor
    parts: Sequence[np.ndarray]  # the indices of each client's samples
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool

    @property
    def images(self) -> bool:
        """Whether samples are bytes of images, channels last."""
        return holds_images(self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        """A sample's shape as the model sees it."""
        return sample_shape(self.x)

    def sizes(self, clients: Sequence[int]) -> list[int]:
        return [len(self.parts[k]) for k in clients]

    def index(self, clients: Sequence[int], width: int) -> Tensor:
        """`[S, width]` on the device: where these clients' samples are, the shorter padded with one of their own."""
        rows = np.empty((len(clients), width), dtype=np.int64)
        for row, k in zip(rows, clients, strict=True):
            part = self.parts[k]
            row[: len(part)], row[len(part) :] = part, part[0]
        return send(torch.from_numpy(rows), self.x.device)

    def test(self, lo: int, hi: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A slice of the normalised test set, images with their channels first."""
        return self.inputs(self.x_test[lo:hi], dtype), self.y_test[lo:hi]

    def inputs(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Stored samples as the model sees them, images with their channels first."""
        x = normalise(x, self.mean, self.std, dtype)
        return channels_first(x) if self.images else x


class Batches:
    """The batches of a chunk of clients, step by step."""

    def __init__(
        self,
        samples: Samples,
        clients: Sequence[int],
        plan: Plan,
        dtype: torch.dtype,
        layout: ImageLayout | None = None,
    ) -> None:
        self.samples, self.dtype, self.layout, self.counts = samples, dtype, layout, plan.counts
        self.steps = plan.sample.shape[1]
        index = samples.index(clients, plan.longest)
        tensors = {"index": index, "sample": plan.sample, "window": plan.window, "key": plan.key}
        if plan.weight is not None:
            tensors["weight"] = plan.weight.to(dtype)
        if min(plan.steps) < self.steps:
            tensors["active"] = send(plan.counts, plan.sample.device) > 0
        self.tensors: dict[str, Tensor] = tensors  # what differs from round to round
        self._windows: Windows | None = None

    @staticmethod
    def stacked(parts: Sequence[Batches]) -> Batches:
        """The batches of several chunks of one data set as those of one."""
        whole = copy.copy(parts[0])
        tensors = [part.tensors for part in parts]
        names = {name for t in tensors for name in t}
        if "weight" in names or "active" in names:
            tensors = [part._ragged() for part in parts]
            names = set(tensors[0])
        whole.tensors = {n: torch.cat([t[n] for t in tensors], _client(n)) for n in sorted(names)}
        return whole

    def dummies(self, count: int) -> Batches:
        """The batches of the first client, `count` times."""
        tensors = {n: v.narrow(_client(n), 0, 1).repeat_interleave(count, _client(n)) for n, v in self.tensors.items()}
        return self.over(tensors)

    def _ragged(self) -> dict[str, Tensor]:
        """The tensors with weights and masks written out, also where all batches are full."""
        sample = self.tensors["sample"]
        full = torch.full(sample.shape, 1 / sample.shape[2], dtype=self.dtype, device=sample.device)
        active = torch.ones(sample.shape[:2], dtype=torch.bool, device=sample.device)
        return {"weight": full, "active": active} | self.tensors

    def over(self, tensors: Mapping[str, Tensor]) -> Batches:
        """The same batches, read from other tensors of the same shapes."""
        if tensors is self.tensors:
            return self
        other = copy.copy(self)
        other.tensors = dict(tensors)
        return other

    def active(self, j: int | Tensor) -> Tensor | None:
        """`[S, 1]`: whether a client still has a step to take; None when all take all of them."""
        return _at(self.tensors["active"], 1, j)[:, None] if "active" in self.tensors else None

    def at(self, j: int | Tensor) -> Batch:
        """Step j; a tensor `[1]` in a captured graph."""
        if self.layout is not None:
            return self._prepared(j, self.layout)
        sample, window = _at(self.tensors["sample"], 1, j), _at(self.tensors["window"], 2, j)
        weight = _at(self.tensors["weight"], 1, j) if "weight" in self.tensors else None
        # one client alone needs no padding, unless it has finished: a model need not take an empty batch
        if weight is not None and len(sample) == 1 and isinstance(j, int) and (n := self.counts[0][j]):
            sample, window, weight = sample[:, :n], window[:, :, :n], None
        where = self.tensors["index"].gather(1, sample)
        key = _at(self.tensors["key"], 1, j)
        return Batch(self._inputs(sample, where, window), self.samples.y[where], weight, key)

    def _prepared(self, j: int | Tensor, layout: ImageLayout) -> Batch:
        from fedman.kernels.gather import gather as prepared

        data, now = self.samples, self.tensors
        step = j if isinstance(j, Tensor) else torch.full((1,), j, device=data.x.device)
        scale_shift = affine(data.mean, data.std, torch.float32, data.x.device)
        plan = now["index"], now["sample"], now["window"]
        x, y = prepared(data.x, data.y, *plan, step, scale_shift, PAD if data.augment else None, *layout)
        return Batch(x, y, _at(now["weight"], 1, j) if "weight" in now else None)

    def _inputs(self, sample: Tensor, where: Tensor, window: Tensor) -> Tensor:
        data = self.samples
        if where.is_cuda:
            x = gather(data.x, where, window if data.augment else None, data.mean, data.std, self.dtype)
            return channels_first(x) if data.images else x
        if self._windows is None:
            x = normalise(data.x[self.tensors["index"]], data.mean, data.std, self.dtype)
            self._windows = Windows(x, data.images, data.augment)
        return self._windows.take(sample, window)


def _client(name: str) -> int:
    """The dimension of a chunk's tensor that runs over clients."""
    return 1 if name == "window" else 0


def _at(v: Tensor, dim: int, j: int | Tensor) -> Tensor:
    return v.select(dim, j) if isinstance(j, int) else v.index_select(dim, j).squeeze(dim)
