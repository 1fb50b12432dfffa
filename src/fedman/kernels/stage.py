"""The shape of one stage (conv, [GroupNorm,] ReLU, 2×2 max-pool) and the precisions of the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

STORAGE = {"bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
"""Precision of products (accumulated in fp32) to the type in which activations and operands are stored."""

Launch = dict[str, Any]
"""Tile sizes and compiler options of one launch: BM, CHUNK, num_warps, num_stages, ..."""


@dataclass(frozen=True)
class Stage:
    """Input images [H, W, C] as stored, `out` channels, kernel size, padding, groups (0: no norm)."""

    height: int
    width: int
    channels: int
    out: int
    kernel: int
    padding: int
    groups: int = 0
    eps: float = 1e-5

    @property
    def map(self) -> tuple[int, int]:
        """Height and width of the map before pooling."""
        return (
            self.height + 2 * self.padding - self.kernel + 1,
            self.width + 2 * self.padding - self.kernel + 1,
        )

    @property
    def windows(self) -> int:
        """2×2 windows of the map, incomplete ones at an odd edge included."""
        height, width = self.map
        return -(-height // 2) * -(-width // 2)

    @property
    def pooled(self) -> int:
        """Pixels after pooling."""
        height, width = self.map
        return (height // 2) * (width // 2)

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time constants that every kernel of the stage takes."""
        oh, ow = self.map
        return {
            "H": self.height, "W": self.width, "C": self.channels, "O": self.out, "KS": self.kernel,
            "PAD": self.padding, "OH": oh, "OW": ow,
        }  # fmt: skip
