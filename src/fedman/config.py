"""The configuration of a run: flat keys, checked all at once, resolved to the last default.

This is the edge of the package: pydantic stays here, training reads plain attributes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedman.algorithms import ALGORITHMS, hyperparameters
from fedman.data import SPECS, is_npz, lookup, partition
from fedman.errors import UserError, nearest
from fedman.paper.presets import PRESETS, SWEEPS, paper_hyperparameters

CUSTOM = "custom"  # arrays or a module handed over in Python
MAX_BYTES = 1 << 20  # of a configuration file
MAX_MISTAKES = 40  # in one message
MODELS = ("cifar_cnn", "tiny_cnn", "small_cnn", "mlp", "resnet18_gn")

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]
Epochs = Annotated[int, Field(ge=1, le=1000)]  # a round's batches are drawn at once
Seed = Annotated[int, Field(ge=0, lt=2**31)]


class Config(BaseModel):
    """Everything that decides a run's result."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    dataset: str = Field("digits", description="data set by name, or npz:PATH for your own arrays")
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
    algorithm: str = Field("fedavg", description="federated algorithm by name")
    zeta: NotNegative = Field(0.0, description="ζ, weight of the MAN term; 0 = plain algorithm")
    man_logits: bool = Field(True, description="count the logits among MAN's layers (the paper's formula)")
    man_variant: Literal["formula", "tiny-code"] = Field(
        "formula", description="tiny-code: the MAN term of the authors' Tiny-ImageNet code"
    )
    alpha: NotNegative | None = Field(None, description="α of FedDyn, FedDC, FedSpeed")
    rho: NotNegative | None = Field(None, description="ρ, ascent length of FedSAM, FedASAM, FedSpeed")
    eta: NotNegative | None = Field(None, description="η_a of FedASAM")
    mu: NotNegative | None = Field(None, description="μ of FedProx")
    stale_ascent: bool | None = Field(None, description="FedSpeed as in the MAN authors' code")
    decayed: bool | None = Field(None, description="FedDC, SCAFFOLD: control states with the decayed rate")

    rounds: Count = Field(500, description="T, number of rounds")
    epochs: Epochs = Field(5, description="E, local epochs a round")
    batch_size: Count = Field(50, description="B, samples a local step")
    lr: Positive = Field(0.1, description="η_0, local learning rate of round 0")
    lr_decay: Annotated[float, Field(gt=0, le=1)] = Field(0.998, description="factor on the rate every round")
    weight_decay: NotNegative = Field(1e-3, description="λ, L2 decay on every parameter")
    clip: Annotated[float, Field(gt=0, allow_inf_nan=True)] = Field(
        10.0, description="C, bound on a gradient's norm; inf = none"
    )
    seed: Seed = Field(0, description="initial weights, batch order, augmentation")

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
    tensorboard: bool = Field(False, description="also write a TensorBoard log")

    @property
    def hyper(self) -> dict[str, Any]:
        """The chosen algorithm's hyper-parameters."""
        return {name: getattr(self, name) for name in hyperparameters(self.algorithm)}

    @property
    def source(self) -> tuple[str, str | None]:
        """The arguments of `fedman.data.load`."""
        return self.dataset, self.data_dir

    @property
    def method(self) -> str:
        """As the paper names it: FedDC, FedDC+MAN."""
        return ALGORITHMS[self.algorithm].title + ("+MAN" if self.zeta > 0 else "")

    def flat(self) -> dict[str, Any]:
        """The keys that have a value, for `config.toml` and `summary.json`."""
        return self.model_dump(exclude_none=True)


HYPERPARAMETERS = sorted({name for algorithm in ALGORITHMS for name in hyperparameters(algorithm)})


def resolve(values: Mapping[str, Any], preset: str | None = None) -> Config:
    """A full configuration from a preset and given keys. All mistakes are reported together."""
    if preset in SWEEPS:
        raise UserError(f"preset: {preset!r} is a sweep of many runs; use fedman sweep --preset {preset}")
    if preset is not None and preset not in PRESETS:
        raise UserError(f"preset: no preset named {preset!r}{nearest(preset, PRESETS)}")
    given = {**(PRESETS[preset] if preset else {}), **values}
    mistakes = [
        f"{key}: no such key{nearest(key, Config.model_fields)}" for key in given if key not in Config.model_fields
    ]
    known = {key: value for key, value in given.items() if key in Config.model_fields}
    try:
        config = Config.model_validate(known)
    except ValidationError as error:
        wrong = {str(e["loc"][0]) for e in error.errors()}
        mistakes += _told(error)
        config = Config.model_validate({k: v for k, v in known.items() if k not in wrong})
    mistakes += _cross_checks(config, known)
    if len(mistakes) == 1:
        raise UserError(mistakes[0])
    if mistakes:
        more = [f"and {len(mistakes) - MAX_MISTAKES} more"] if len(mistakes) > MAX_MISTAKES else []
        raise UserError("\n".join([f"{len(mistakes)} mistakes", *mistakes[:MAX_MISTAKES], *more]))
    return _filled(config, bool(preset))


def parsed(key: str, text: str) -> Any:
    """The value of one key as the configuration holds it: "0.150" is 0.15, "false" is False."""
    try:
        return getattr(Config.model_validate({key: text}), key)
    except ValidationError as error:
        raise UserError(_told(error)[0]) from None


def _told(error: ValidationError) -> list[str]:
    return [f"{e['loc'][0]}: {e['msg'].removeprefix('Input ')}, not {shown(e['input'])}" for e in error.errors()]


def _cross_checks(config: Config, known: Mapping[str, Any]) -> Iterable[str]:
    """What one field cannot know alone: names, and which keys go together."""
    yield from (f"{key}: has a NUL character" for key, value in known.items() if "\0" in str(value))
    if config.algorithm not in ALGORITHMS:
        yield f"algorithm: no algorithm named {config.algorithm!r}{nearest(config.algorithm, ALGORITHMS)}"
    else:
        own = hyperparameters(config.algorithm)
        for key in HYPERPARAMETERS:
            if known.get(key) is not None and key not in own:
                has = f"it has {', '.join(own)}" if own else "it has none"
                yield f"{key}: {config.algorithm} has no such hyper-parameter ({has})"
    if config.model and config.model not in (*MODELS, CUSTOM):
        yield f"model: no model named {config.model!r}{nearest(config.model, MODELS)}"
    for check, value in ((_known_dataset, config.dataset), (partition.parse, config.partition)):
        try:
            check(value)
        except UserError as error:
            yield str(error)
    if config.man_variant == "tiny-code" and (config.model or default_model(config.dataset)) != "tiny_cnn":
        yield "man_variant: tiny-code belongs to model tiny_cnn"
    if config.man_variant == "tiny-code" and config.man_logits:
        yield "man_variant: tiny-code has no logits term; add man_logits=false"


def _filled(config: Config, paper: bool) -> Config:
    """Every default that depends on another key, filled in."""
    spec = SPECS.get(config.dataset)
    hyper: dict[str, Any] = dict(hyperparameters(config.algorithm))
    if paper:
        hyper |= paper_hyperparameters(config.algorithm, config.dataset, config.partition, config.zeta > 0)
    filled: dict[str, Any] = {key: value for key, value in hyper.items() if getattr(config, key) is None}
    if not config.model:
        filled["model"] = default_model(config.dataset)
    if config.target is None and spec is not None:
        filled["target"] = spec.target
    if config.augment is None and spec is not None:
        filled["augment"] = spec.augment
    return config.model_copy(update=filled)


def default_model(dataset: str) -> str:
    """The model that goes with a data set; for a user's own arrays the one that takes any shape."""
    return SPECS[dataset].model if dataset in SPECS else "mlp"


def _known_dataset(name: str) -> None:
    if name != CUSTOM and not is_npz(name):
        lookup(name)


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
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{path}: has more than {MAX_BYTES} bytes, which no configuration needs")
        values = tomllib.loads(content.decode())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
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
