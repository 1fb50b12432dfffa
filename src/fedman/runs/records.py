"""Types of what is in the files of a run and of `fedman results`, and the one validator for all that is read back.

pydantic is imported when something is read, so that training does without it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import floor, inf, isfinite, log10, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypeAlias, TypeVar, cast, final

from annotated_types import Interval
from typing_extensions import TypedDict

from fedman.errors import UserError, shown
from fedman.tasks import TASKS, Task

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

LOCAL = ("data_dir", "checkpoint_seconds", "keep_state", "log", "tensorboard")
"""Keys that do not decide a run's result; the last is that of earlier versions."""

Finite = Annotated[float, Interval(gt=-inf, lt=inf)]  # excludes not-a-number too
Percent = Annotated[float, Interval(ge=0, le=100)]
PERCENT = ("accuracy", "exact")  # figures of tasks that are shares
Seconds = Annotated[float, Interval(ge=0, le=1e12)]
Count = Annotated[int, Interval(ge=0, le=10**18)]


class Spread(TypedDict):
    """The headline of one model on the clients' own test sets."""

    mean: float
    worst_tenth: float
    spread: float  # standard deviation
    each: NotRequired[list[float]]  # at the end of a run: every client's


class RoundRecord(TypedDict):
    """A line of `rounds.jsonl`."""

    round: Count  # counted from 1
    cohort: list[int]
    quarantined: list[int]  # clients whose upload or figures were not finite
    lr: Finite
    loss: Finite  # mean over the cohort's local steps
    penalty: NotRequired[dict[str, Finite]]  # its terms: of MAN the mean square activation by layer
    # a figure of the task by its name, here that of classification: of the models evaluated, "all", "sel", "cloud"
    accuracy: NotRequired[dict[str, Percent]]
    test_loss: dict[str, float]  # of the same models; that of a finite model can overflow
    seconds: Seconds
    clients: NotRequired[Spread]  # the headline on the clients' own test samples
    extended_from: NotRequired[Count]  # `rounds` as it was before this round, if it was raised there
    refused: NotRequired[dict[str, str]]  # Flower: client -> why its reply was not used; "node N" -> why it is none
    attempts: NotRequired[Count]  # Flower
    attackers: NotRequired[list[int]]  # in a run with an attack: who of the cohort attacked
    bytes_down: NotRequired[Count]  # Flower: of arrays, to all clients
    bytes_up: NotRequired[Count]  # Flower: of arrays that were used
    restarted: NotRequired[list[int]]  # Flower: clients that had lost their memory and started without one


Progress: TypeAlias = Callable[[RoundRecord], object]
"""Called with the record of every round; `StopRun` ends the run after it."""


class Curve(TypedDict):
    """The headline of `all` (or of `cloud`: `headline_curve`) over the rounds, thinned."""

    round: list[Count]
    all: list[float]


class Source(TypedDict):
    """Where the code of a run can be found: a commit (`changed`: with changes that are in no commit), or a release."""

    commit: NotRequired[str]
    changed: NotRequired[bool]
    release: NotRequired[str]
    unknown: NotRequired[str]  # why there is neither


class Computed(TypedDict):
    """How rounds of a run were computed."""

    source: Source
    precision: str


@final
class Summary(TypedDict):
    """`summary.json` of a finished run, and its line in a results file."""

    config: Settings
    method: str
    headline: NotRequired[str]  # the figure by which runs are compared, where it is not accuracy
    lower_is_better: NotRequired[bool]
    accuracy: NotRequired[dict[str, Percent]]  # a figure of the task by its name, as in a record
    clients: NotRequired[Spread]
    test_loss: dict[str, float]
    rounds_to_target: Count | None
    evaluated_on: NotRequired[str]  # "validation" where the figures are not of the test set
    seconds: Seconds
    device: str
    precision: str
    execution: NotRequired[str]  # how several clients were computed at once
    version: str
    source: NotRequired[Source]  # not in files of earlier versions
    earlier_sources: NotRequired[list[Source]]  # of other code, which had computed rounds before the run was resumed
    inputs: NotRequired[dict[str, str]]  # hashes of data and of a module of the user's own
    torch: str
    stopped: NotRequired[str]  # why a callback or a tracker ended it, and after which round
    round: NotRequired[Count]
    stacked: NotRequired[Count]  # the number of runs that shared the GPU
    extended: NotRequired[list[Count]]  # the rounds after which `rounds` was raised
    curve: NotRequired[Curve]  # in a results file


@final
class Divergence(TypedDict):
    """`diverged.json` of a run that ended without a finite model, and its line in a results file."""

    config: Settings
    diverged: str  # why
    round: Count
    precision: NotRequired[str]  # not in those of earlier versions
    version: str
    source: NotRequired[Source]
    earlier_sources: NotRequired[list[Source]]
    inputs: NotRequired[dict[str, str]]
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
    target: NotRequired[Finite]
    partition_seed: NotRequired[Count]
    unbalanced: NotRequired[Finite]


class _Accuracy(TypedDict, total=False):
    all: Percent
    cloud: Percent


class _Figure(TypedDict, total=False):
    all: float  # of a finite model it can overflow
    cloud: float


class _Row(TypedDict):
    """What tables and figures need of a row beyond what every ending has."""

    config: Axes
    accuracy: NotRequired[_Accuracy]
    curve: Curve


def decisive(settings: Settings) -> Settings:
    """The keys that decide a run's result."""
    return {key: value for key, value in settings.items() if key not in LOCAL}


def axes(row: ResultRow) -> Axes:
    """The configuration of a row by its main keys, which every row has."""
    return cast(Axes, row["config"])


def evaluated_on(settings: Mapping[str, object]) -> str:
    """Of which samples the figures of a run are: those of the "test" set, or of the "validation" part held out."""
    return "validation" if settings.get("validation") else "test"


@dataclass(frozen=True)
class Headline:
    """The figure by which runs of a task are compared."""

    name: str = "accuracy"
    lower_is_better: bool = False

    @classmethod
    def of(cls, task: Task | type[Task]) -> Headline:
        """That of a task."""
        return cls(task.headline, not task.higher_is_better)

    @property
    def unit(self) -> str:
        """What follows a value: " %", or nothing."""
        return " %" if self.name in PERCENT else ""

    @property
    def column(self) -> str:
        """For the head of a column: "accuracy %", "rmse"."""
        return f"{self.name}{self.unit}"

    def title(self, of: str = "", on: str = "test") -> str:
        """For a table or an axis: "test accuracy, %", "test rmse of the clients, lower is better"."""
        more = f", {self.unit.strip()}" if self.unit else ""
        return f"{on} {self.name}{of}{more}{', lower is better' if self.lower_is_better else ''}"

    def form(self, *values: float) -> str:
        """A format for these values: two decimals of a percentage, else four digits of the largest.

        >>> Headline().form(53.1), Headline("rmse").form(0.0412, 0.12), Headline("rmse").form(21234.5)
        ('.2f', '.4f', '.0f')
        """
        largest = max((abs(v) for v in values if isfinite(v)), default=0.0)
        if self.unit or not largest:
            return ".2f"
        return f".{max(0, 3 - floor(log10(largest)))}f" if 1e-3 <= largest < 1e7 else ".3e"

    def shown(self, value: float) -> str:
        """A value with its unit: "53.10 %", "0.4120"."""
        return f"{value:{self.form(value)}}{self.unit}"

    def gain(self, before: float, after: float) -> float:
        """How much better `after` is: positive where it is, whatever the direction."""
        return before - after if self.lower_is_better else after - before

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is as good as the target."""
        return value <= target if self.lower_is_better else value >= target


def headline_of(ending: Ending) -> Headline:
    """What an ended run is compared by. Of one that diverged only fedman's own tasks are known, others count as
    accuracy."""
    if "diverged" in ending:
        task = TASKS.built_in.get(str(ending["config"].get("task")))
        return Headline.of(task) if task else Headline()
    return Headline(ending.get("headline", "accuracy"), ending.get("lower_is_better", False))


def how_run(summary: Summary) -> str:
    """In which time a run was played, on what and how: "3.2 s on cpu (2 threads), fp32, vmap"."""
    execution = f", {summary['execution']}" if "execution" in summary else ""  # not in files of earlier versions
    return f"{summary['seconds']:.1f} s on {summary['device']}, {summary['precision']}{execution}"


def figures(record: RoundRecord | Ending) -> dict[str, dict[str, float]]:
    """All figures of the task in a record or a summary, the headline first, and of each model evaluated the value."""
    fields = {*RoundRecord.__annotations__, *Summary.__annotations__, "man"} - {"accuracy"}  # `penalty` was `man` once
    return {
        name: cast(dict[str, float], value)
        for name, value in record.items()
        if name not in fields and isinstance(value, dict) and all(type(v) in (int, float) for v in value.values())
    }


def figure(record: RoundRecord | Ending, name: str) -> dict[str, float]:
    """A figure of the task, by model: of those evaluated."""
    return cast(dict[str, dict[str, float]], record).get(name, {})


def headline_curve(records: Iterable[RoundRecord], name: str) -> list[tuple[int, float]]:
    """Rounds, and the figure of that name of `all` after each; of the server's model where `all` is not kept."""
    found = [(record["round"], figure(record, name)) for record in records]
    model = "all" if any("all" in values for _, values in found) else "cloud"
    return [(t, values[model]) for t, values in found if model in values]


def headline(ending: Ending) -> float:
    """The headline of `all`, the mean of all clients' last models (accuracy in percent); not a number if the run
    diverged, or if it is not finite.

    Where that mean is not kept (a federation on Flower can do without), it is that of the server's model.
    """
    if "diverged" in ending:
        return nan
    found = figure(ending, headline_of(ending).name)
    value = found.get("all", found.get("cloud", nan))
    return value if isfinite(value) else nan


def stopped_early(endings: Iterable[Ending]) -> str:
    """How many of these runs a callback or a tracker ended before their last round, and when: "2 runs were stopped
    early, after round 3"; nothing where none was."""
    rounds = sorted(end.get("round", 0) for end in endings if "diverged" not in end and "stopped" in end)
    if not rounds:
        return ""
    when = f"round {rounds[0]}" if rounds[0] == rounds[-1] else f"rounds {rounds[0]} to {rounds[-1]}"
    return f"{len(rounds)} {'run was' if len(rounds) == 1 else 'runs were'} stopped early, after {when}"


def is_explained(ending: Ending) -> bool:
    """Whether commits or releases have all the code that made it."""
    sources: list[Source] = [ending.get("source", {}), *ending.get("earlier_sources", [])]
    return all("release" in source or ("commit" in source and not source.get("changed")) for source in sources)


def differing(one: Settings, other: Settings) -> list[str]:
    """The keys whose values differ."""
    return sorted(key for key in {*one, *other} if one.get(key) != other.get(key))


def is_extended(before: Settings, now: Settings) -> bool:
    """Whether the two differ in nothing but more `rounds` now; refused where the rates of the rounds before would be
    others."""
    old, new = before.get("rounds"), now.get("rounds")
    more = differing(before, now) == ["rounds"] and isinstance(old, int) and isinstance(new, int) and old < new
    if more and now.get("lr_schedule") == "cosine":
        raise UserError(f"rounds: cannot be raised from {old} to {new} with lr_schedule=cosine, which ends at {old}")
    return more


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
    if "diverged" in row:
        return check(Divergence, row, where)
    summary = check(Summary, row, where)
    name = headline_of(summary).name
    if name not in row:
        raise UserError(f"{where}: {name} is missing")
    if not {"all", "cloud"} & check(_Figure, cast(Any, row)[name], f"{where}: {name}").keys():
        raise UserError(f"{where}: {name}: all is missing")
    return summary


def check(kind: type[Record], value: object, where: str) -> Record:
    """`value` itself, unknown keys included, once it has all fields of `kind`, of the right types."""
    from pydantic import ValidationError

    try:
        _adapter(cast(Any, kind)).validate_python(value, strict=True)
    except ValidationError as error:
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
