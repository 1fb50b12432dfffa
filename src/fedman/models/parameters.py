"""A module's parameters as one flat vector: the only place that knows their order, shapes and names.

A model is P numbers: its parameters in the order of `model.parameters()`, each flattened, joined one after the other.
The backward pass of `unflatten` is one concatenation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterLayout:
    """Names and shapes of the tensors in a vector `[..., P]`.

    >>> layout = ParameterLayout.of(nn.Linear(3, 2))
    >>> layout.size, {name: v.shape for name, v in layout.unflatten(torch.zeros(5, 8)).items()}
    (8, {'weight': torch.Size([5, 2, 3]), 'bias': torch.Size([5, 2])})
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @staticmethod
    def of(model: nn.Module, names: Iterable[str] | None = None) -> ParameterLayout:
        """All parameters of a module, or those named, in the module's order."""
        chosen = None if names is None else set(names)
        found = {name: p.shape for name, p in model.named_parameters() if chosen is None or name in chosen}
        return ParameterLayout(tuple(found), tuple(found.values()))

    @property
    def sizes(self) -> list[int]:
        """The entries of each tensor."""
        return [shape.numel() for shape in self.shapes]

    @property
    def size(self) -> int:
        """P, the entries of all tensors."""
        return sum(self.sizes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Named tensors as a vector `[P]`."""
        return torch.cat([tensors[name].flatten() for name in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector `[..., P]` seen as named tensors `[..., *shape]`."""
        parts = zip(self.names, vector.split(self.sizes, dim=-1), self.shapes, strict=True)
        return {name: part.unflatten(-1, shape) if len(shape) else part.squeeze(-1) for name, part, shape in parts}

    def is_weight(self) -> Tensor:
        """`[P]`: True for the entries of tensors whose name contains "weight"."""
        return torch.tensor(["weight" in name for name in self.names]).repeat_interleave(torch.tensor(self.sizes))


def flatten(model: nn.Module) -> Tensor:
    """A module's parameters as a vector `[P]`."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
