"""The models by name. A new one is a file beside this and an entry here.

Models are plain modules: none of them knows about penalties, clients or stacking. This module imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedman.errors import UserError, shown_type
from fedman.parts import find

if TYPE_CHECKING:
    from torch import nn

ANY_SHAPE = "mlp"
"""The model that takes samples of any shape."""


MODELS = {
    "cifar_cnn": "fedman.models.convnet:cifar_cnn",
    "tiny_cnn": "fedman.models.convnet:tiny_cnn",
    "small_cnn": "fedman.models.convnet:small_cnn",
    ANY_SHAPE: "fedman.models.mlp:MLP",
    "dropout_cnn": "fedman.models.convnet:DropoutCNN",
    "resnet18_gn": "fedman.models.resnet:ResNet18",
    "resnet18_bn": "fedman.models.resnet:resnet18_bn",
    "lstm": "fedman.models.text:LSTM",
    "transformer": "fedman.models.text:Transformer",
}
"""Where each model's builder is, "module:name": a function of the shape of a sample and the number of outputs."""

OF_IDS = ("lstm", "transformer")
"""The models of samples that are ids `[T]`; their output is `[B, T, outputs]`."""


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


def build(name: str, shape: Sequence[int], outputs: int) -> nn.Module:
    """The model `name` for samples of `shape` and so many outputs, with PyTorch's default initialisation.

    `module:builder` is a user's own: a function of the shape and the number of outputs, or a class made with both.
    """
    if name in MODELS:
        _check_shape(name, shape)
        model: nn.Module = find("model", MODELS[name])(shape, outputs)
        return model
    builder = find("model", name, MODELS)
    if not callable(builder):
        raise UserError(f"model: {name} is {shown_type(builder)}, not a function of a sample's shape and the outputs")
    try:
        own = builder(shape, outputs)
    except UserError:
        raise
    except Exception as error:  # a user's builder may raise anything
        why = f"{type(error).__name__}: {error}".split("\n")[0]
        raise UserError(f"model: {name}({tuple(shape)}, {outputs}) failed ({why})") from error
    from torch import nn

    if not isinstance(own, nn.Module):
        raise UserError(f"model: {name} returned {shown_type(own)}, not an nn.Module")
    return own


def takes_ids(model: nn.Module) -> bool:
    """Whether samples must stay whole numbers for this model: it looks them up in an `nn.Embedding`."""
    from torch import nn

    return any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())


def _check_shape(name: str, shape: Sequence[int]) -> None:
    if name in OF_IDS and len(shape) != 1:
        raise UserError(f"model: {name} needs samples of ids [T], the data has samples of shape {tuple(shape)}")
    if name not in (ANY_SHAPE, *OF_IDS) and len(shape) != 3:
        raise UserError(f"model: {name} needs images, the data has rows of shape {tuple(shape)}; try model={ANY_SHAPE}")


def man_variant(model: str | None, variant: str) -> ManVariant:
    """The form of the MAN term called `variant`, for the model of this name; None: whatever model."""
    if variant not in MAN_VARIANTS:
        raise UserError(f"man_variant: {variant!r} is not one of {', '.join(MAN_VARIANTS)}")
    found = MAN_VARIANTS[variant]
    if model is not None and found.model not in (None, model):
        raise UserError(f"man_variant: {variant} belongs to model {found.model}")
    return found
