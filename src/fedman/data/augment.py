"""Normalised and augmented batches from stored samples, for several clients at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fedman.data.images import holds_images

PAD = 4  # pixels of padding for the random crop, for all data sets of the paper


def normalise(x: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> Tensor:
    """(x/255 − mean)/std per channel for stored bytes `[..., H, W, C]`; other numbers are only cast, ids stay."""
    if not holds_images(x):
        return x.to(dtype) if x.is_floating_point() else x
    scale, shift = affine(tuple(mean), tuple(std), dtype, x.device)
    return x.to(dtype) * scale - shift


@cache
def affine(
    mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(scale, shift) per channel: x·scale − shift. Cached on the device: a captured graph cannot copy from the host."""
    scale = 1 / (255 * torch.tensor(std, dtype=dtype, device=device))
    return scale, torch.tensor(mean, dtype=dtype, device=device) * 255 * scale


def channels_first(x: Tensor) -> Tensor:
    """A view of `[..., H, W, C]` as `[..., C, H, W]`: torch's channels_last layout."""
    return x.movedim(-1, -3)


class Windows:
    """The samples of S clients, prepared so that an augmented batch is one indexing operation.

    Images `[S, n, H, W, C]` are held twice, as they are and mirrored, each padded with zeros (the mean colour,
    since they are normalised); every crop of every image is then a window into that array.
    """

    def __init__(self, x: Tensor, images: bool, augment: bool) -> None:
        self.x, self.images, self.augment = x, images, augment
        self.row = torch.arange(len(x), device=x.device)[:, None]
        if augment:
            both = torch.stack([x, x.flip(-2)], dim=1)  # [S, 2, n, H, W, C]
            padded = F.pad(both, (0, 0, PAD, PAD, PAD, PAD))
            height, width = x.shape[-3:-1]
            self.x = padded.unfold(3, height, 1).unfold(4, width, 1)  # [S, 2, n, 2·PAD+1, 2·PAD+1, C, H, W]

    def take(self, sample: Tensor, window: Tensor) -> Tensor:
        """The batch `[S, B, ...]`, images with their channels first, at one step of a plan."""
        if self.augment:
            mirror, down, right = window
            return self.x[self.row, mirror, sample, down, right]
        x = self.x[self.row, sample]
        return channels_first(x) if self.images else x


def gather(
    x: Tensor, where: Tensor, window: Tensor | None, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """The stored samples `where` `[S, B]`, normalised: of images windows `[S, B, H, W, C]`, straight from the bytes.

    The same batch as `Windows.take`, with nothing prepared beforehand: better on a GPU, where memory is scarcer than
    arithmetic and a captured graph needs tensors whose addresses do not change from round to round.
    """
    if window is None:
        return normalise(x[where], mean, std, dtype)
    height, width = x.shape[1:3]
    mirror, down, right = window[..., None]
    row = torch.arange(height, device=x.device) + down - PAD
    column = torch.arange(width, device=x.device) + right - PAD
    inside = ((row >= 0) & (row < height))[..., None] & ((column >= 0) & (column < width))[..., None, :]
    column = torch.where(mirror.bool(), width - 1 - column, column).clamp(0, width - 1)
    pixel = (where[..., None] * height + row.clamp(0, height - 1))[..., None] * width + column[..., None, :]
    return normalise(x.view(-1, x.shape[-1])[pixel], mean, std, dtype) * inside[..., None]
