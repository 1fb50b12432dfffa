"""A TensorBoard log of a run, where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedman.errors import UserError
from fedman.runs.folder import RunFolder


@contextmanager
def tensorboard(folder: RunFolder) -> Iterator[Any]:
    """A TensorBoard writer into the run's folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("tensorboard: not installed; pip install 'fedman[tensorboard]'") from None
    with SummaryWriter(str(folder.path / "tensorboard")) as writer:
        yield writer


def log_round(log: Any, record: dict[str, Any]) -> None:
    """One record as TensorBoard scalars."""
    scalars = {"loss": record["loss"], "lr": record["lr"]}
    scalars |= {f"accuracy/{k}": v for k, v in record["accuracy"].items()}
    scalars |= {f"man/{k}": v for k, v in record["man"].items()}
    for name, value in scalars.items():
        log.add_scalar(name, value, record["round"])
