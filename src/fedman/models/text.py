"""Models of text: from ids `[B, T]` to scores of the next id at every position `[B, T, V]`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class LSTM(nn.Module):
    """LEAF's model for Shakespeare: embedding, two LSTM layers, linear; 815,945 parameters for 65 characters.

    Each LSTM layer is a module, so that MAN counts both. On a CPU the modules, one client after the other, take half
    the time of an LSTM written out in matrix products that are stacked over clients.
    """

    def __init__(
        self, shape: Sequence[int], vocabulary: int, width: int = 8, hidden: Sequence[int] = (256, 256)
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        widths = [width, *hidden]
        self.lstms = nn.ModuleList(nn.LSTM(a, b, batch_first=True) for a, b in zip(widths, hidden, strict=False))
        self.head = nn.Linear(widths[-1], vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for lstm in self.lstms:
            x, _ = lstm(x)
        return self.head(x)


class Transformer(nn.Module):
    """A small decoder: embedding and learned positions, causal layers (normalised first, GELU), norm, linear.

    820,289 parameters for 65 characters and windows of 80. No dropout.
    """

    def __init__(
        self, shape: Sequence[int], vocabulary: int, width: int = 128, heads: int = 4, layers: int = 4
    ) -> None:
        super().__init__()
        (length,) = shape
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, nn.GELU(), batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, ids.device, self.positions.dtype)
        x = self.embedding(ids) + self.positions[:length]
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(self.norm(x))
