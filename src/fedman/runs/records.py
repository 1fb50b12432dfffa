"""Types of what is in the files of a run and of `fedman results`, and the one validator for all that is read back.

pydantic is imported when something is read, so that training does without it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import cache
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypeAlias, TypeVar, cast, final

from annotated_types import Interval
from typing_extensions import TypedDict

from fedman.errors import UserError

if TYPE_CHECKING:
    from pydantic import TypeAdapter


class _Scalar:
    """One message for a value that is none of several types, in place of one for each type."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import custom_error_schema

        message = "should be a number, a string, true or false"
        return custom_error_schema(handler(source), "scalar", custom_error_message=message)


Settings: TypeAlias = dict[str, Annotated[bool | int | float | str, _Scalar]]
"""The keys of a configuration that have a value, as `Config.flat` gives them. A number may be infinite."""

LOCAL = ("data_dir", "checkpoint_seconds", "keep_state", "tensorboard")
"""Keys that do not decide a run's result."""

Finite = Annotated[float, Interval(gt=-inf, lt=inf)]  # excludes not-a-number too
Percent = Annotated[float, Interval(ge=0, le=100)]
Seconds = Annotated[float, Interval(ge=0, le=1e12)]
Count = Annotated[int, Interval(ge=0, le=10**18)]


class RoundRecord(TypedDict):
    """A line of `rounds.jsonl`."""

    round: Count  # counted from 1
    cohort: list[int]
    quarantined: list[int]  # clients whose upload or figures were not finite
    lr: Finite
    loss: Finite  # mean over the cohort's local steps
    man: dict[str, Finite]  # mean square activation by layer
    accuracy: dict[str, Percent]  # of the models evaluated in this round: "all", "sel", "cloud"
    test_loss: dict[str, float]  # of the same models; that of a finite model can overflow
    seconds: Seconds
    extended_from: NotRequired[Count]  # `rounds` as it was before this round, if it was raised there
    refused: NotRequired[dict[str, str]]  # Flower: client -> why its reply was not used
    attempts: NotRequired[Count]  # Flower
    bytes_down: NotRequired[Count]  # Flower: of arrays, to all clients
    bytes_up: NotRequired[Count]  # Flower: of arrays that were used


Progress: TypeAlias = Callable[[RoundRecord], object]
"""Called with the record of every round."""


class Curve(TypedDict):
    """The accuracy of `all` over the rounds, thinned."""

    round: list[Count]
    all: list[Percent]


@final
class Summary(TypedDict):
    """`summary.json` of a finished run, and its line in a results file."""

    config: Settings
    method: str
    accuracy: dict[str, Percent]
    test_loss: dict[str, float]
    rounds_to_target: Count | None
    seconds: Seconds
    device: str
    precision: str
    version: str
    torch: str
    stacked: NotRequired[Count]  # the number of runs that shared the GPU
    extended: NotRequired[list[Count]]  # the rounds after which `rounds` was raised
    curve: NotRequired[Curve]  # in a results file


@final
class Divergence(TypedDict):
    """`diverged.json` of a run that ended without a finite model, and its line in a results file."""

    config: Settings
    diverged: str  # why
    round: Count
    version: str
    curve: NotRequired[Curve]  # in a results file


Ending: TypeAlias = Summary | Divergence
"""How a run ended: `"diverged" in ending` tells which."""

ResultRow: TypeAlias = Ending
"""A line of a results file: an ending with its curve; `config` is without `data_dir`."""


class Axes(TypedDict):
    """The keys of a configuration by which tables and figures arrange runs."""

    dataset: str
    partition: str
    algorithm: str
    zeta: Finite
    seed: Count
    rounds: Count
    clients: Count
    target: NotRequired[Percent]
    partition_seed: NotRequired[Count]
    unbalanced: NotRequired[Finite]


class _All(TypedDict):
    all: Percent


class _Row(TypedDict):
    """What tables and figures need of a row beyond what every ending has."""

    config: Axes
    accuracy: NotRequired[_All]
    curve: Curve


def decisive(settings: Settings) -> Settings:
    """The keys that decide a run's result."""
    return {key: value for key, value in settings.items() if key not in LOCAL}


def axes(row: ResultRow) -> Axes:
    """The configuration of a row by its main keys, which every row has."""
    return cast(Axes, row["config"])


def headline(ending: Ending) -> float:
    """The test accuracy of `all`, the mean of all clients' last models, in percent; not a number if the run diverged.

    Where that mean is not kept (a federation on Flower can do without), it is that of the server's model.
    """
    if "diverged" in ending:
        return nan
    accuracy = ending["accuracy"]
    return accuracy.get("all", accuracy.get("cloud", nan))


def differing(one: Settings, other: Settings) -> list[str]:
    """The keys whose values differ."""
    return sorted(key for key in {*one, *other} if one.get(key) != other.get(key))


def is_extended(before: Settings, now: Settings) -> bool:
    """Whether the two differ in nothing but more `rounds` now."""
    old, new = before.get("rounds"), now.get("rounds")
    return differing(before, now) == ["rounds"] and isinstance(old, int) and isinstance(new, int) and old < new


Record = TypeVar("Record")


def read(kind: type[Record], path: Path) -> Record:
    """A JSON file as a record of this kind."""
    return check(kind, parse(content(path), str(path)), str(path))


def content(path: Path) -> bytes:
    """The bytes of a regular file. A pipe, which would be waited for, and a device, which never ends, are refused."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(f"{path}: is not a regular file")
            return file.read()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def check_row(value: object, where: str) -> ResultRow:
    """`value` as a line of a results file."""
    row = check(_Row, value, where)
    if len(row["curve"]["round"]) != len(row["curve"]["all"]):
        raise UserError(f"{where}: curve must hold as many values in `all` as in `round`")
    return check(Divergence, row, where) if "diverged" in row else check(Summary, row, where)


def check(kind: type[Record], value: object, where: str) -> Record:
    """`value` itself, unknown keys included, once it has all fields of `kind`, of the right types."""
    from pydantic import ValidationError

    try:
        _adapter(cast(Any, kind)).validate_python(value, strict=True)
    except ValidationError as error:
        from fedman.config import shown

        first = error.errors(include_url=False)[0]
        field = "".join(f"{part}." for part in first["loc"])[:-1]
        if first["type"] == "missing":
            raise UserError(f"{where}: {field} is missing") from None
        wanted = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        wanted = wanted.replace("valid dictionary", "JSON object")
        raise UserError(f"{where}: {field}{' ' if field else ''}{wanted}, not {shown(first['input'])}") from None
    return cast(Record, value)


def parse(text: bytes | str, where: str, wanted: str = "JSON") -> object:
    """A JSON text as plain values. Nesting that is too deep and lone surrogates are mistakes as well."""
    from pydantic_core import from_json

    try:
        return from_json(text)
    except ValueError as error:
        raise UserError(f"{where}: not {wanted}: {error}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
