"""How samples are stored: uint8 arrays of more than two axes hold images, their channels last; all others hold numbers
used as they are.

The functions take NumPy arrays and torch tensors alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def holds_images(x: np.ndarray | Tensor) -> bool:
    """Whether samples are images, uint8 [n, H, W, C]; rows of bytes are whole numbers like any other."""
    return x.ndim > 2 and str(x.dtype).removeprefix("torch.") == "uint8"


def sample_shape(x: np.ndarray | Tensor) -> tuple[int, ...]:
    """The shape of one sample as a model sees it: (C, H, W) for images, that of a row otherwise."""
    shape = tuple(x.shape[1:])
    return (*shape[-1:], *shape[:-1]) if holds_images(x) else shape


def is_deep(mode: str) -> bool:
    """Whether a Pillow picture of this mode has values of more than a byte, as 16-bit grey PNGs (`I;16`) have."""
    return mode.startswith(("I", "F"))
