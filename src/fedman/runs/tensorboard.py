"""A TensorBoard log of a run, if the configuration asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedman.errors import UserError
from fedman.runs.folder import RunFolder
from fedman.runs.records import RoundRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@contextmanager
def tensorboard(folder: RunFolder) -> Iterator[SummaryWriter]:
    """A TensorBoard writer into the run's folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("tensorboard: not installed; pip install 'fedman[tensorboard]'") from None
    with SummaryWriter(str(folder.tensorboard)) as writer:
        yield writer


def log_round(log: SummaryWriter, record: RoundRecord) -> None:
    """Write one record as TensorBoard scalars."""
    scalars = {"loss": record["loss"], "lr": record["lr"]}
    scalars |= {f"accuracy/{name}": value for name, value in record["accuracy"].items()}
    scalars |= {f"man/{layer}": value for layer, value in record["man"].items()}
    for name, value in scalars.items():
        log.add_scalar(name, value, record["round"])
