"""The models by name. A new one is a file beside this and an entry here.

Models are plain modules: none of them knows about penalties, clients or stacking. No batch statistics anywhere, so
that a client's loss depends on its own weights alone. This module imports without torch.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.errors import UserError

if TYPE_CHECKING:
    from torch import nn

ANY_SHAPE = "mlp"
"""The model that takes samples of any shape."""


MODELS = {
    "cifar_cnn": "fedman.models.convnet:cifar_cnn",
    "tiny_cnn": "fedman.models.convnet:tiny_cnn",
    "small_cnn": "fedman.models.convnet:small_cnn",
    ANY_SHAPE: "fedman.models.mlp:MLP",
    "resnet18_gn": "fedman.models.resnet:ResNet18",
}
"""Where each model's builder is, "module:name": a function of the shape of a sample and the number of classes."""


@dataclass(frozen=True)
class ManVariant:
    """Which activations the MAN term measures, and how."""

    layers: Mapping[str, str] | None = None  # module to measure, by their names; None: all activations, mean of squares
    logits: bool = True  # whether the logits may be a layer too
    model: str | None = None  # the model it belongs to; None: any


MAN_VARIANTS = {
    "formula": ManVariant(),
    # The term of the authors' Tiny-ImageNet code: it misses the third convolution and adds the batch variance of the
    # second linear layer.
    "tiny-code": ManVariant(
        {
            "relus.0": "mean_square",
            "relus.1": "mean_square",
            "relus.3": "mean_square",
            "relus.4": "mean_square_and_variance",
        },
        logits=False,
        model="tiny_cnn",
    ),
}


def build(name: str, shape: Sequence[int], classes: int) -> nn.Module:
    """The model `name` for samples of `shape` and `classes` outputs, with PyTorch's default initialisation."""
    if name not in MODELS:
        raise UserError(f"model: {name!r} is not one of {', '.join(MODELS)}; hand a module of your own to fedman.run")
    if name != ANY_SHAPE and len(shape) != 3:
        raise UserError(f"model: {name} needs images, the data has rows of shape {tuple(shape)}; try model={ANY_SHAPE}")
    builder = pkgutil.resolve_name(MODELS[name])
    return builder(shape, classes)


def man_variant(model: str, variant: str) -> ManVariant:
    """The form of the MAN term called `variant`, for this model."""
    if variant not in MAN_VARIANTS:
        raise UserError(f"man_variant: {variant!r} is not one of {', '.join(MAN_VARIANTS)}")
    found = MAN_VARIANTS[variant]
    if found.model not in (None, model):
        raise UserError(f"man_variant: {variant} belongs to model {found.model}")
    return found
