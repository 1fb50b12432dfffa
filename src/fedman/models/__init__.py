"""The models by name. A new one is a file beside this and an entry here.

Models are plain modules: none of them knows about penalties, clients or stacking. No batch statistics anywhere, so
that a client's loss depends on its own weights alone. This module imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from fedman.errors import UserError

if TYPE_CHECKING:
    from torch import nn

ANY_SHAPE = "mlp"
"""The model that takes samples of any shape."""


@dataclass(frozen=True)
class ManVariant:
    """Which activations of a model the MAN term measures, and how."""

    layers: Mapping[str, str] | None = None  # module to measure, by their names; None: all activations, mean of squares
    logits: bool = True  # whether the logits may be a layer too


@dataclass(frozen=True)
class ModelSpec:
    """What is known of a model before it is built."""

    builder: str  # "module:name" of a function of (shape of a sample, number of classes)
    images: bool = True  # takes images [C, H, W] only
    man_variants: Mapping[str, ManVariant] = field(default_factory=dict)  # beside the paper's formula


MODELS = {
    "cifar_cnn": ModelSpec("fedman.models.convnet:cifar_cnn"),
    "tiny_cnn": ModelSpec(
        "fedman.models.convnet:tiny_cnn",
        # The term of the authors' Tiny-ImageNet code: it misses the third convolution and adds the batch variance of
        # the second linear layer.
        man_variants={
            "tiny-code": ManVariant(
                {
                    "relus.0": "mean_square",
                    "relus.1": "mean_square",
                    "relus.3": "mean_square",
                    "relus.4": "mean_square_and_variance",
                },
                logits=False,
            )
        },
    ),
    "small_cnn": ModelSpec("fedman.models.convnet:small_cnn"),
    "mlp": ModelSpec("fedman.models.mlp:MLP", images=False),
    "resnet18_gn": ModelSpec("fedman.models.resnet:ResNet18"),
}


def build(name: str, shape: Sequence[int], classes: int) -> nn.Module:
    """The model `name` for samples of `shape` and `classes` outputs, with PyTorch's default initialisation."""
    if name not in MODELS:
        raise UserError(f"model: {name!r} is not one of {', '.join(MODELS)}; hand a module of your own to fedman.run")
    spec = MODELS[name]
    if spec.images and len(shape) != 3:
        raise UserError(f"model: {name} needs images, the data has rows of shape {tuple(shape)}; try model={ANY_SHAPE}")
    module, _, builder = spec.builder.partition(":")
    model: nn.Module = getattr(import_module(module), builder)(shape, classes)
    return model


def man_variant(model: str, variant: str) -> ManVariant:
    """The form of the MAN term called `variant`: "formula", the paper's, suits every model; others belong to one."""
    if variant == "formula":
        return ManVariant()
    if model in MODELS and variant in MODELS[model].man_variants:
        return MODELS[model].man_variants[variant]
    owners = [name for name, spec in MODELS.items() if variant in spec.man_variants]
    if not owners:
        variants = ["formula", *(name for spec in MODELS.values() for name in spec.man_variants)]
        raise UserError(f"man_variant: {variant!r} is not one of {', '.join(variants)}")
    raise UserError(f"man_variant: {variant} belongs to model {' or '.join(owners)}")
