"""Samples in a fixed order, in batches that fit in memory, on the device and in the precision of the computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedman.errors import UserError

PROBE = 64  # samples on which a loss is tried
Loss = Callable[[Any, Any], Tensor]  # loss(model's output, target): the mean over the samples of a batch


class Batches:
    """Pairs (inputs, target), read once and kept in their order, so that every product uses the same samples.

    `data` is one pair or an iterable of pairs such as a `DataLoader`. Inputs are a tensor, or a tuple or mapping of
    tensors for models with several arguments. Batches larger than `batch_size` are split, which bounds the memory of a
    product. `limit` takes only the first samples. `resident` keeps all samples on the device; otherwise each batch is
    copied there when it is needed.
    """

    def __init__(
        self,
        data: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_size: int | None = None,
        limit: int | None = None,
        resident: bool = True,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("limit", limit)):
            if value is not None and value < 1:
                raise UserError(f"{name}: {value} is not a positive number of samples")
        self.device, self.dtype = device, dtype
        pairs = [data] if _is_pair(data) else data
        self._batches = [self._move(b) if resident else b for b in _split(pairs, batch_size, limit)]
        self.samples = sum(len(y) for _, y in self._batches)
        if not self.samples:
            raise UserError("batches: no samples in the data; at least one is needed")

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[float, Any, Any]]:
        """Each batch's share of all samples, its inputs and its target."""
        for x, y in self._batches:
            yield len(y) / self.samples, *self._move((x, y))

    def _move(self, item: Any) -> Any:
        return map_tensors(lambda t: t.to(self.device, self.dtype if t.is_floating_point() else None), item)


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """The model's output for inputs as `Batches` yields them."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


@torch.no_grad()
def require_mean(model: Callable[..., Any], loss: Loss, batches: Batches) -> None:
    """Refuse a loss that depends on how the samples are divided into batches, such as a sum or one with class weights.

    Up to 64 samples of the first batch are compared with their halves, which hold other classes where targets are
    classes. Of a single batch there is nothing to compare.
    """
    if len(batches) < 2:
        return
    _, x, y = next(iter(batches))
    few = torch.arange(0, len(y), -(-len(y) // PROBE), device=y.device)
    few = few[: len(few) // 2 * 2]
    if len(few) < 4:
        return
    order = few[y[few].argsort(stable=True)] if y.ndim == 1 else few
    values = []
    for rows in (order, *order.chunk(2)):
        inputs, target = map_tensors(lambda t, rows=rows: t[rows], (x, y))  # type: ignore[misc]
        value = loss(call(model, inputs), target)
        if not isinstance(value, Tensor) or value.ndim:
            return  # refused where it is met
        values.append(float(value))
    whole, mean = values[0], (values[1] + values[2]) / 2
    if abs(whole - mean) > max(1e-3 * max(map(abs, values)), 1e-5):
        raise UserError(
            f"loss: of {len(order)} samples {whole:.6g}, but the mean of the losses of their halves is {mean:.6g}; the "
            "mean over samples is needed: no sum, no class weights or ignored targets that a batch is divided by"
        )


def map_tensors(f: Callable[[Tensor], Tensor], item: Any) -> Any:
    """The same tuples and mappings with f of every tensor; other things stay as they are."""
    if isinstance(item, Tensor):
        return f(item)
    if isinstance(item, Mapping):
        return {key: map_tensors(f, value) for key, value in item.items()}
    if isinstance(item, (tuple, list)):
        return tuple(map_tensors(f, value) for value in item)
    return item


def _is_pair(data: Any) -> bool:
    """Whether it is (x, y) rather than a sequence of two batches: the target of a pair is a tensor."""
    return isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], Tensor)


def _split(pairs: Iterable[Any], size: int | None, limit: int | None) -> Iterator[tuple[Any, Any]]:
    left = math.inf if limit is None else limit
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise UserError(f"batches: an item is a {type(pair).__name__}, pairs (inputs, target) are needed")
        x, y = pair
        if not isinstance(y, Tensor) or y.ndim == 0:
            raise UserError(f"batches: a target is a {type(y).__name__}, a tensor with one entry per sample is needed")
        n = int(min(left, len(y)))
        for start in range(0, n, size or n or 1):
            part = slice(start, min(n, start + (size or n)))
            yield map_tensors(lambda t, part=part: t[part], (x, y))  # type: ignore[misc]
        left -= n
        if not left:
            return
