"""Options of a server on Flower, beside the run's configuration: how long it waits and which replies it accepts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedman.config import format_errors
from fedman.errors import UserError
from fedman.flower.screen import FACTOR
from fedman.runs.atomic import write_toml
from fedman.runs.key_text import read_toml

Seconds = Annotated[float, Field(gt=0, le=1e7)]


class ServerOptions(BaseModel):
    """Keys that only a run on Flower has."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    wait: Seconds = Field(300.0, description="seconds to wait for all clients before the first round")
    round_timeout: Seconds = Field(600.0, description="seconds a client has for a round")
    retries: Annotated[int, Field(ge=0, le=100)] = Field(2, description="repetitions of a round with too few replies")
    quorum: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="share of a cohort whose replies must be good")
    norm_bound: Annotated[float, Field(gt=0)] | None = Field(
        None, description="largest distance a client's model may move [what its clipped steps allow]"
    )
    norm_factor: Annotated[float, Field(gt=1, allow_inf_nan=True)] = Field(
        FACTOR, description="largest distance a client's model may move, in medians of the round"
    )
    sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, description="samples of each client, where clients have data of their own: 120,80,…"
    )
    roster: str | None = Field(
        None, description="a file of lines with a client's number and its node's public key; no other key is accepted"
    )
    bind_keys: bool = Field(
        True, description="a client's number belongs to the key of the first node whose reply as this client was used"
    )
    keep_last: bool = Field(
        True,
        description="compute `all`, the mean of all clients' last models, kept in OUT/uploads [aggregation=mean]",
    )

    @field_validator("sizes", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value


OPTIONS_FILE = "flower.toml"
"""The file in a run's folder that holds these keys, beside `config.toml`."""

FIXED = ("sizes", "keep_last")
"""Keys that a resumed run cannot change."""


def refuse_changed(folder: Path, options: ServerOptions) -> None:
    """Refuse to resume the run in a folder, if there is one, with other fixed options than it has."""
    if (folder / OPTIONS_FILE).exists():
        before = ServerOptions.model_validate(read_toml(folder / OPTIONS_FILE))
        changed = [key for key in FIXED if getattr(before, key) != getattr(options, key)]
        if changed:
            raise UserError(f"{folder}: holds a run of another configuration; {', '.join(changed)} differ")


def save_options(folder: Path, options: ServerOptions) -> None:
    """Write the options into the run's folder."""
    write_toml(folder / OPTIONS_FILE, options.model_dump(exclude_none=True))


def split_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], ServerOptions]:
    """The keys of the run's configuration, and the server's options made of the others."""
    given = {key: value for key, value in values.items() if key in ServerOptions.model_fields}
    try:
        options = ServerOptions.model_validate(given)
    except ValidationError as error:
        raise UserError(next(iter(format_errors(error).values()))) from None
    return {key: value for key, value in values.items() if key not in given}, options
