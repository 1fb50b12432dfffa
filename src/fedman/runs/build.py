"""From a configuration and a data set to an engine: clients, model, MAN's layers, algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fedman.algorithms import ALGORITHMS, hyperparameters
from fedman.data import Dataset, partition
from fedman.errors import UserError
from fedman.execution.device import pick_precision
from fedman.execution.stacked import Stacked
from fedman.models import build
from fedman.penalties.man import Measure, mean_square, mean_square_and_variance
from fedman.training.batches import Samples
from fedman.training.engine import Engine, Training

if TYPE_CHECKING:
    from fedman.config import Config


def stackable(config: Config) -> tuple[object, ...]:
    """Runs with the same value can share a chunk: all that decides the work is the same, but for seed, partition, ζ and
    the algorithm's other numbers (a switch of the algorithm decides the work)."""
    numbers = [k for k, v in hyperparameters(config.algorithm).items() if not isinstance(v, bool)]
    apart = ("seed", "zeta", "partition", "partition_seed", "unbalanced", *numbers)
    return tuple(sorted((k, v) for k, v in config.flat().items() if k not in apart))


def make_engine(
    config: Config,
    data: Dataset,
    shared: Samples,
    model: nn.Module | None,
    device: str,
    parts: Sequence[np.ndarray] | None = None,
    kind: Callable[..., Engine] = Engine,
) -> Engine:
    """The engine of a configuration on samples that are on the device already.

    `parts` are the clients' samples where they are not the configured partition; `kind` makes another engine.
    """
    if parts is None:
        parts = partition.for_config(config, data)
    augment = data.augment if config.augment is None else config.augment
    if augment and not shared.images:
        raise UserError(f"augment: {data.name} holds no images of bytes (uint8); use augment=false")
    model = model if model is not None else initial_model(config.model, data, config.seed)
    stacked = Stacked(model, output=config.man_logits, layers=man_layers(config.man_variant))
    return kind(
        stacked,
        ALGORITHMS[config.algorithm](**config.hyper),
        replace(shared, parts=[torch.as_tensor(p, device=device) for p in parts], augment=augment),
        Training(**{name: getattr(config, name) for name in Training.__dataclass_fields__}),
        chunk=config.chunk,
        device=device,
        precision=pick_precision(config.precision, device, stacked.large),
    )


def on_device(data: Dataset, device: str) -> Samples:
    """A data set's samples on the device, not yet split over clients."""
    x, y, x_test, y_test = (
        torch.as_tensor(a, device=device) for a in (data.x_train, data.y_train, data.x_test, data.y_test)
    )
    return Samples(x, y, x_test, y_test, [], data.mean, data.std, data.augment)


def initial_model(name: str, data: Dataset, seed: int) -> nn.Module:
    """The model with PyTorch's default initialisation under `seed`, always drawn on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(name, data.shape, data.classes)


def man_layers(variant: str) -> dict[str, Measure] | None:
    """None: the paper's formula (all activations). "tiny-code": the term in the authors' Tiny-ImageNet code, which
    misses the third convolution and adds the batch variance of the second linear layer (protocol §2.5)."""
    if variant == "formula":
        return None
    return {"relus.0": mean_square, "relus.1": mean_square, "relus.3": mean_square, "relus.4": mean_square_and_variance}
