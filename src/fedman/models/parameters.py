"""A module's parameters as one flat vector: the only place that knows their order, shapes and names.

A model is P numbers: its trained parameters in the order of `model.parameters()`, each flattened, joined one after the
other; frozen ones (`requires_grad=False`) are constants of the module. The backward pass of `unflatten` is one
concatenation. Its buffers, such as the running statistics of batch-norm, are a vector of their own, of Q numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from fedman.errors import UserError, describe


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
        """The parameters of a module that are trained (`requires_grad`), or those named, in the module's order."""
        chosen = None if names is None else set(names)
        found = {
            name: p.shape
            for name, p in model.named_parameters()
            if (p.requires_grad if chosen is None else name in chosen)
        }
        return ParameterLayout(tuple(found), tuple(found.values()))

    @staticmethod
    def of_buffers(model: nn.Module) -> ParameterLayout:
        """The buffers that training may change: of those in the module's `state_dict` the floating-point ones that are
        finite, and the counters of batch-norm."""
        kept = model.state_dict()
        found = {name: v.shape for name, v in model.named_buffers() if name in kept and _changes(name, v)}
        return ParameterLayout(tuple(found), tuple(found.values()))

    @cached_property
    def sizes(self) -> list[int]:
        """The entries of each tensor."""
        return [shape.numel() for shape in self.shapes]

    @property
    def size(self) -> int:
        """P, the entries of all tensors."""
        return sum(self.sizes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Named tensors as a vector `[P]`."""
        return torch.cat([tensors[name].flatten() for name in self.names]) if self.names else torch.empty(0)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector `[..., P]` seen as named tensors `[..., *shape]`."""
        parts = zip(self.names, vector.split(self.sizes, dim=-1), self.shapes, strict=True)
        return {name: part.unflatten(-1, shape) if len(shape) else part.squeeze(-1) for name, part, shape in parts}

    def is_weight(self) -> Tensor:
        """`[P]`: True for the entries of tensors whose name contains "weight"."""
        return self.where(["weight" in name for name in self.names])

    def where(self, chosen: Iterable[bool]) -> Tensor:
        """`[P]`: True for the entries of the tensors chosen, a value for each."""
        parts = [torch.full((n,), each) for n, each in zip(self.sizes, chosen, strict=True)]
        return torch.cat([torch.empty(0, dtype=torch.bool), *parts])


def batch_norm_entries(model: nn.Module) -> Tensor:
    """`[P + Q]`: True for the scale, the shift and the statistics of batch-norm layers."""
    modules = {name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    layouts = ParameterLayout.of(model), ParameterLayout.of_buffers(model)
    return torch.cat([each.where(name.rpartition(".")[0] in modules for name in each.names) for each in layouts])


def flatten(model: nn.Module) -> Tensor:
    """A module's trained parameters as a vector `[P]`."""
    return ParameterLayout.of(model).flatten({name: p.detach() for name, p in model.named_parameters()})


def flatten_buffers(model: nn.Module) -> Tensor:
    """A module's buffers as a vector `[Q]`: see `ParameterLayout.of_buffers`."""
    return ParameterLayout.of_buffers(model).flatten({name: v.detach() for name, v in model.named_buffers()})


def other_names(model: nn.Module) -> dict[str, str]:
    """Of the parameters and buffers that several modules share: the other names of each, and the one that
    `named_parameters` gives it. A module in several places is one module, whose tensors have one name."""
    first: dict[int, str] = {}
    found = {}
    for prefix, module in model.named_modules():
        for named in (module.named_parameters, module.named_buffers):
            for name, v in named(prefix, recurse=False, remove_duplicate=False):
                if first.setdefault(id(v), name) != name:
                    found[name] = first[id(v)]
    return found


def holding(model: nn.Module, tensors: Mapping[str, Tensor], others: Mapping[str, str]) -> AbstractContextManager[None]:
    """For a while the module has these parameters and buffers, also under their `other_names`.

    PyTorch's own way (`tie_weights`) puts them into a module in several places twice, and leaves them there.
    """
    given = dict(tensors) | {other: tensors[name] for other, name in others.items() if name in tensors}
    return _reparametrize_module(model, given, tie_weights=False)


def copy_of(model: nn.Module, shared: Mapping[int, object] | None = None) -> nn.Module:
    """A copy of a module, also of one that has been called before. `shared`: by id what the copy has in the place of
    some of the module's objects.

    `copy.deepcopy` refuses tensors that autograd computed: activations that a module keeps, weights that a hook
    computes from others before every call (pruning, the former `weight_norm`). They are copied as values where they are
    attributes of modules; a module that keeps them in a list is refused.
    """
    kept = [v for module in model.modules() for v in vars(module).values() if isinstance(v, Tensor) and not v.is_leaf]
    try:
        return copy.deepcopy(model, {id(v): v.detach().clone() for v in kept} | dict(shared or {}))
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"model: {type(model).__name__} cannot be copied ({describe(error)})") from error


def _changes(name: str, v: Tensor) -> bool:
    if v.is_floating_point():
        return bool(v.isfinite().all())
    return name.rpartition(".")[2] == "num_batches_tracked"
