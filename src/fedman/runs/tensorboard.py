"""A TensorBoard log of a run, if the configuration asks for one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fedman.errors import UserError
from fedman.runs.folder import RunFolder
from fedman.runs.records import Progress, RoundRecord, figures


@contextmanager
def tensorboard(folder: RunFolder, progress: Progress) -> Iterator[Progress]:
    """`progress` that first writes the record's numbers to a TensorBoard log in the run's folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("tensorboard: not installed; pip install tensorboard") from None
    with SummaryWriter(str(folder.path / "tensorboard")) as writer:

        def log(record: RoundRecord) -> None:
            scalars = {"loss": record["loss"], "lr": record["lr"]}
            groups: dict[str, Mapping[str, object]] = {**figures(record), "test_loss": record["test_loss"]}
            groups |= {"penalty": record.get("penalty", {}), "clients": record.get("clients", {})}
            for group, values in groups.items():
                scalars |= {f"{group}/{name}": value for name, value in values.items() if isinstance(value, float)}
            for name, value in scalars.items():
                writer.add_scalar(name, value, record["round"])
            progress(record)

        yield log
