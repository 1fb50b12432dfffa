"""Between host and device without waiting: a GPU that is never waited for is never idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def send(values: Tensor | Sequence[Any] | float, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of `values` on the device. A plain copy to a GPU would wait for all work queued there."""
    here = torch.as_tensor(values, dtype=dtype)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


class Fetched:
    """A tensor on its way to the host; `values` waits for it, and not for what was queued after it."""

    def __init__(self, v: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._here = v
        if v.is_cuda:
            self._here = torch.empty(v.shape, dtype=v.dtype, pin_memory=True).copy_(v, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def values(self) -> Any:
        """As nested lists of numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here.tolist()
