"""The configuration of a run: flat keys, validated together, with all defaults filled in.

Training reads plain attributes of `Config` and does not import pydantic.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from fedman.algorithms import ALGORITHMS, Algorithm
from fedman.data import SPECS, is_npz, lookup, partition
from fedman.errors import UserError, nearest
from fedman.models import ANY_SHAPE, MAN_VARIANTS, MODELS, man_variant
from fedman.training.settings import Training

CUSTOM = "custom"  # arrays or a module passed in from Python
MAX_BYTES = 1 << 20  # of a configuration file
MAX_DOTS = 2000  # in it
MAX_MISTAKES = 40  # in one message
VARIANTS = ", ".join(f"{name} (model {v.model})" if v.model else name for name, v in MAN_VARIANTS.items())
TRAINING = Training()  # the defaults

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]
Epochs = Annotated[int, Field(ge=1, le=1000)]  # a round's batches are drawn at once
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Hyper = Mapping[str, bool | int | float]


class Config(BaseModel):
    """Everything that decides a run's result."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    dataset: str = Field(next(iter(SPECS)), description="data set by name, or npz:PATH for your own arrays")
    data_dir: str | None = Field(None, description="where data sets lie [$FEDMAN_DATA or ~/.cache/fedman]")
    augment: bool | None = Field(None, description="mirror and crop training images [natural images only]")
    partition: str = Field("dir0.3", description="iid, dirX (Dirichlet) or pathC (C classes a client)")
    partition_seed: Seed = Field(0, description="seed of the partition, apart from the run's")
    unbalanced: Annotated[float, Field(ge=0, le=5)] = Field(0.0, description="σ of log-normal client sizes")
    clients: Count = Field(100, description="N, number of clients")
    participation: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="share of clients in a round")
    cohort: Literal["bernoulli", "fixed"] = Field("bernoulli", description="cohorts of random or of fixed size")
    schedule_seed: Seed = Field(0, description="seed of the cohorts, apart from the run's")

    model: str = Field("", description="model by name [by data set]")
    algorithm: str = Field(next(iter(ALGORITHMS)), description="federated algorithm by name")
    zeta: NotNegative = Field(TRAINING.zeta, description="ζ, weight of the MAN term; 0 = plain algorithm")
    man_logits: bool = Field(True, description="count the logits among MAN's layers (the paper's formula)")
    man_variant: str = Field("formula", description=f"form of the MAN term: {VARIANTS}")

    rounds: Count = Field(500, description="T, number of rounds")
    epochs: Epochs = Field(TRAINING.epochs, description="E, local epochs a round")
    batch_size: Count = Field(TRAINING.batch_size, description="B, samples a local step")
    lr: Positive = Field(TRAINING.lr, description="η_0, local learning rate of round 0")
    lr_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        TRAINING.lr_decay, description="factor on the rate every round"
    )
    weight_decay: NotNegative = Field(TRAINING.weight_decay, description="λ, L2 decay on every parameter")
    clip: Annotated[float, Field(gt=0, allow_inf_nan=True)] = Field(
        TRAINING.clip, description="C, bound on a gradient's norm; inf = none"
    )
    seed: Seed = Field(TRAINING.seed, description="initial weights, batch order, augmentation")

    target: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None, description="accuracy in percent for rounds-to-target [by data set]"
    )
    eval_every: Count = Field(1, description="rounds between evaluations of `all`")
    eval_others_every: Count = Field(10, description="rounds between evaluations of `sel` and `cloud`")
    precision: Literal["auto", "fp64", "fp32", "tf32", "bf16"] = Field(
        "auto", description="of products; auto: bf16 on CUDA, and for a large model on a CPU that has it; else fp32"
    )
    chunk: Count | None = Field(None, description="clients worked on together [by model and device]")
    checkpoint_seconds: NotNegative = Field(60.0, description="at least this long between checkpoints")
    keep_state: bool = Field(True, description="keep the last checkpoint, so that `rounds` can be raised later")
    tensorboard: bool = Field(False, description="also write a TensorBoard log")

    @property
    def source(self) -> tuple[str, str | None]:
        """The arguments of `fedman.data.load`."""
        return self.dataset, self.data_dir

    @property
    def method(self) -> str:
        """As the paper names it: FedDC, FedDC+MAN."""
        return ALGORITHMS[self.algorithm].title + ("+MAN" if self.zeta > 0 else "")

    @property
    def hyper(self) -> Hyper:
        """The hyper-parameters of the algorithm."""
        return {key: getattr(self, key) for key in type(self).model_fields if key not in KEYS}

    def flat(self) -> dict[str, bool | int | float | str]:
        """The keys that have a value, for `config.toml` and `summary.json`."""
        return self.model_dump(exclude_none=True)


KEYS = Config.model_fields
"""The keys that every run has, whatever its algorithm."""


@cache
def config_class(algorithms: tuple[type[Algorithm], ...]) -> type[Config]:
    """`Config` with the hyper-parameters of these algorithms, which are their dataclass fields."""
    found: dict[str, Any] = {
        f.name: (get_type_hints(algorithm)[f.name], Field(f.default, **f.metadata))
        for algorithm in algorithms
        for f in fields(algorithm)
    }
    return create_model("Config", __base__=Config, **found)


@dataclass(frozen=True)
class Preset:
    """Settings under one name: values of keys, and hyper-parameters that depend on the other settings."""

    keys: Mapping[str, Any]
    hyper: Callable[[Config], Hyper] = lambda config: {}


def resolve(values: Mapping[str, Any], preset: Preset | None = None) -> Config:
    """A full configuration from a preset and given keys. All mistakes are reported together."""
    given = {**(preset.keys if preset else {}), **values}
    algorithm = str(given.get("algorithm", KEYS["algorithm"].default))
    known = [algorithm] if algorithm in ALGORITHMS else ALGORITHMS
    config, mistakes = _validate(config_class(tuple(ALGORITHMS[name] for name in known)), given)
    config = _fill_defaults(config)
    mistakes = [*_unknown_keys(given, config), *mistakes]
    mistakes += [f"{key}: has a NUL character" for key, value in given.items() if "\0" in str(value)]
    mistakes += [f"{key}: is not Unicode text" for key, value in given.items() if _has_surrogates(str(value))]
    mistakes += _check_names(config)
    if len(mistakes) == 1:
        raise UserError(mistakes[0])
    if mistakes:
        more = [f"and {len(mistakes) - MAX_MISTAKES} more"] if len(mistakes) > MAX_MISTAKES else []
        raise UserError("\n".join([f"{len(mistakes)} mistakes", *mistakes[:MAX_MISTAKES], *more]))
    of_preset = preset.hyper(config) if preset else {}
    return config.model_copy(update={k: v for k, v in of_preset.items() if k not in config.model_fields_set})


def _has_surrogates(text: str) -> bool:
    """Whether a word of the command line was no UTF-8: it could not be written to `config.toml`."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def parse_value(key: str, text: str, algorithms: Iterable[type[Algorithm]]) -> Any:
    """The value of one key as the configuration holds it: "0.150" is 0.15, "false" is False."""
    parsed, mistakes = _validate(config_class(tuple(algorithms)), {key: text})
    if mistakes:
        raise UserError(mistakes[0])
    return getattr(parsed, key)


def _validate(kind: type[Config], given: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """The values that are valid, and a line for each of the others. A hyper-parameter that is None has its default."""
    values = {k: v for k, v in given.items() if k in KEYS or (k in kind.model_fields and v is not None)}
    try:
        return kind.model_validate(values), []
    except ValidationError as error:
        wrong = format_errors(error)
        return kind.model_validate({k: v for k, v in values.items() if k not in wrong}), list(wrong.values())


def format_errors(error: ValidationError) -> dict[str, str]:
    """A line for each wrong key: the key, what is allowed, what was given."""
    found = ((str(e["loc"][0]), e["msg"].removeprefix("Input "), shown(e["input"])) for e in error.errors())
    return {key: f"{key}: {wanted}, not {given}" for key, wanted, given in found}


def _fill_defaults(config: Config) -> Config:
    """The configuration with every default that depends on the data set; a user's own arrays can have any shape."""
    spec = SPECS.get(config.dataset)
    defaults = {"model": spec.model, "target": spec.target, "augment": spec.augment} if spec else {"model": ANY_SHAPE}
    return config.model_copy(update={k: v for k, v in defaults.items() if getattr(config, k) in (None, "")})


def _unknown_keys(given: Mapping[str, Any], config: Config) -> Iterable[str]:
    """Keys that are neither those of every run nor hyper-parameters of its algorithm."""
    own, registered = type(config).model_fields, config_class(tuple(ALGORITHMS.values())).model_fields
    for key, value in given.items():
        if key not in registered:
            yield f"{key}: no such key{nearest(key, [*own, *registered])}"
        elif key not in own and value is not None:
            has = f"it has {', '.join(config.hyper)}" if config.hyper else "it has none"
            yield f"{key}: {config.algorithm} has no such hyper-parameter ({has})"


def _check_names(config: Config) -> Iterable[str]:
    """What one field cannot check alone: names in registries, and settings that do not go together."""
    if config.algorithm not in ALGORITHMS:
        yield f"algorithm: no algorithm named {config.algorithm!r}{nearest(config.algorithm, ALGORITHMS)}"
    if config.model not in (*MODELS, CUSTOM):
        yield f"model: no model named {config.model!r}{nearest(config.model, MODELS)}"
    checks = (
        lambda: config.dataset == CUSTOM or is_npz(config.dataset) or lookup(config.dataset),
        lambda: partition.parse(config.partition),
        lambda: _check_man_variant(config),
    )
    for check in checks:
        try:
            check()
        except UserError as error:
            yield str(error)


def _check_man_variant(config: Config) -> None:
    variant = man_variant(config.model, config.man_variant)
    if config.man_logits and not variant.logits:
        raise UserError(f"man_variant: {config.man_variant} has no logits term; add man_logits=false")


def overrides(words: Iterable[str]) -> dict[str, str]:
    """KEY=VALUE words of a command line as a mapping."""
    values: dict[str, str] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key:
            raise UserError(f"{shown(word)}: expected KEY=VALUE, as in zeta=0.15")
        if key in values:
            raise UserError(f"{key}: given twice, as {shown(values[key])} and {shown(value)}")
        values[key] = value
    return values


def read_toml(path: str | Path) -> dict[str, Any]:
    """The keys of a TOML file."""
    try:
        with open(path, "rb") as file:
            return parse_toml(file.read(MAX_BYTES + 1), path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def parse_toml(content: bytes, path: str | Path) -> dict[str, Any]:
    """The keys in the contents of a TOML file; `path` names it in errors."""
    if len(content) > MAX_BYTES:
        raise UserError(f"{path}: has more than {MAX_BYTES} bytes, which no configuration needs")
    if content.count(b".") > MAX_DOTS:  # of a dotted key, whose time grows with the square of its length
        raise UserError(f"{path}: has more than {MAX_DOTS} dots, which no configuration needs")
    try:
        values = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a TOML file: {' '.join(str(error).split())[:200]}") from None
    tables = [key for key, value in values.items() if isinstance(value, dict)]
    if tables:
        raise UserError(f"{path}: keys are flat; [{tables[0]}] is a table")
    return values


def shown(value: Any, limit: int = 60) -> str:
    """A value in a message: one line, not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
