"""What a server on Flower is told beside the run's configuration: how long it waits, and whom it trusts how far."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedman.config import read_toml, shown
from fedman.errors import UserError
from fedman.flower.screen import FACTOR
from fedman.runs.atomic import write_toml

Seconds = Annotated[float, Field(gt=0, le=1e7)]


class Service(BaseModel):
    """Keys of a run on Flower alone."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    wait: Seconds = Field(300.0, description="seconds to wait for all clients before the first round")
    round_timeout: Seconds = Field(600.0, description="seconds a client has for a round")
    retries: Annotated[int, Field(ge=0, le=100)] = Field(2, description="times a round is repeated for want of replies")
    quorum: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="share of a cohort that must reply well")
    norm_bound: Annotated[float, Field(gt=0)] | None = Field(
        None, description="bound on the distance a client's model may move [what its clipped steps can]"
    )
    norm_factor: Annotated[float, Field(gt=1, allow_inf_nan=True)] = Field(
        FACTOR, description="times the round's median distance a client's model may move"
    )
    sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, description="samples of each client, where clients have data of their own: 120,80,…"
    )
    keep_last: bool = Field(True, description="keep the mean of all clients' last models, `all`, at twice the upload")

    @field_validator("sizes", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value


FILE = "flower.toml"
"""Where a run's folder keeps these keys, beside `config.toml`."""

LASTING = ("sizes", "keep_last")
"""Keys that a resumed run cannot change."""


def keep(folder: Path, service: Service, resume: bool) -> None:
    """Write the service into the run's folder; refuse one that does not go on with what is there."""
    values = service.model_dump(exclude_none=True)
    if resume and (folder / FILE).exists():
        before = Service.model_validate(read_toml(folder / FILE))
        changed = [key for key in LASTING if getattr(before, key) != getattr(service, key)]
        if changed:
            raise UserError(f"{folder}: holds a run of another configuration; {', '.join(changed)} differ")
    write_toml(folder / FILE, values)


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], Service]:
    """The keys of the run's configuration, and the service made of the others."""
    own = {key: value for key, value in values.items() if key in Service.model_fields}
    try:
        service = Service.model_validate(own)
    except ValidationError as error:
        e = error.errors()[0]
        key = str(e["loc"][0])
        raise UserError(f"{key}: {e['msg'].removeprefix('Input ')}, not {shown(own[key])}") from None
    return {key: value for key, value in values.items() if key not in own}, service
