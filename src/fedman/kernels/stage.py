"""The shape of one stage (conv, [GroupNorm,] ReLU, 2×2 max-pool) and the precisions of the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

STORAGE = {"bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
"""Precision of products (accumulated in fp32) to the type in which activations and operands are stored."""

EPS = 1e-5  # of nn.GroupNorm

Launch = dict[str, Any]
"""Tile sizes and compiler options of one launch: BM, CHUNK, num_warps, num_stages, ..."""


@dataclass(frozen=True)
class Stage:
    """Input images [H, W, C] as stored, `out` channels, kernel size, padding, groups (0: no norm), stride.

    `image` is the number of an image's own channels in the first stage, which stores more (`first_stage`); else 0.
    """

    height: int
    width: int
    channels: int
    out: int
    kernel: int
    padding: int
    groups: int = 0
    image: int = 0
    stride: int = 1

    @property
    def map(self) -> tuple[int, int]:
        """Height and width of the map before pooling."""
        border = 2 * self.padding - self.kernel
        return (self.height + border) // self.stride + 1, (self.width + border) // self.stride + 1

    @property
    def windows(self) -> int:
        """2×2 windows of the map, incomplete ones at an odd edge included."""
        height, width = self.map
        return -(-height // 2) * -(-width // 2)

    def chunks(self, batch: int, options: Launch) -> int:
        """How many programs share the windows of a client's batch."""
        return -(-batch * self.windows // options["CHUNK"])

    @property
    def pooled(self) -> int:
        """Pixels after pooling."""
        height, width = self.map
        return (height // 2) * (width // 2)

    @property
    def depth(self) -> int:
        """K of packed weights (`conv.pack`)."""
        if not self.image:
            return self.kernel**2 * self.channels
        return 1 << (self.kernel * (self.kernel + 1) * self.channels - 1).bit_length()

    def constants(self, kernel: Any) -> dict[str, float]:
        """Those of the stage's compile-time constants that `kernel` takes."""
        oh, ow = self.map
        known = {
            "H": self.height, "W": self.width, "C": self.channels, "O": self.out, "KS": self.kernel,
            "PAD": self.padding, "STRIDE": self.stride, "OH": oh, "OW": ow, "G": self.groups, "EPS": EPS,
        }  # fmt: skip
        return {name: known[name] for name in kernel.arg_names if name in known}
