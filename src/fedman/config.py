"""The configuration of a run: flat keys, validated together, with all defaults filled in.

Training reads plain attributes of `Config` and does not import pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from fedman import trackers
from fedman.aggregation import AGGREGATIONS, Aggregation
from fedman.algorithms import ALGORITHMS, Algorithm
from fedman.data import SPECS, is_path, lookup, natural_clients, rules
from fedman.errors import UserError, did_you_mean, nearest, shown
from fedman.models import ANY_SHAPE, MODELS
from fedman.optimizers import OPTIMIZERS, LocalOptimizer
from fedman.parts import Hyper, Registry, hints, hyperparameters
from fedman.penalties import PENALTIES, Penalty
from fedman.tasks import TASKS, Classification, Task
from fedman.tasks.targets import fitting
from fedman.training.attacks import ATTACKS, Attack
from fedman.training.settings import BatchNorm, LrSchedule, Training

if TYPE_CHECKING:
    from fedman.data import Dataset

CUSTOM = "custom"  # arrays or a module passed in from Python
MAX_MISTAKES = 40  # in one message
HELD_OUT = 0.1  # `validation` of a tuning, where no other share is given
TRAINING = Training()  # the defaults
PARTS: dict[str, Registry[Any]] = {
    "task": TASKS,
    "penalty": PENALTIES,
    "optimizer": OPTIMIZERS,
    "aggregation": AGGREGATIONS,
    "attack": ATTACKS,
    "algorithm": ALGORITHMS,
}
"""The keys whose values are parts, which bring keys of their own: their hyper-parameters."""

UNSAID = {
    **{kind: registry.default for kind, registry in PARTS.items() if kind != "algorithm"},
    "validation": 0.0,
    "lr_schedule": TRAINING.lr_schedule,
    "warmup": TRAINING.warmup,
    "keep_optimizer": TRAINING.keep_optimizer,
    "log": "",
    "execution": "auto",
    "deterministic": True,
    "batch_norm": TRAINING.batch_norm,
    **hyperparameters(OPTIMIZERS[OPTIMIZERS.default]),
}
"""Values that a stored configuration leaves out: those of keys that older ones do not have."""

OTHER_WORDS = {
    "criterion": "task", "loss": "task", "metric": "task", "regularizer": "penalty", "method": "algorithm",
    "strategy": "algorithm", "learning_rate": "lr", "local_epochs": "epochs", "num_clients": "clients",
    "num_rounds": "rounds", "global_rounds": "rounds", "join_ratio": "participation", "fraction_fit": "participation",
    "max_norm": "clip", "data": "dataset", "random_seed": "seed", "man": "zeta", "callback": "progress, in Python",
}  # fmt: skip
"""What other libraries call the keys."""

_RANGE = re.compile(r"\d+(-|\.\.)\d+")
PLAIN_WORDS = {"a valid integer": "a whole number", "a valid number": "a number", "a valid boolean": "true or false"}

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]
Epochs = Annotated[int, Field(ge=1, le=1000)]  # a round's batches are drawn at once
Seed = Annotated[int, Field(ge=0, lt=2**31)]


class Config(BaseModel):
    """Everything that decides a run's result."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    dataset: str = Field(
        next(iter(SPECS)), description="data set by name, or your own files: npz:PATH, leaf:PATH, images:DIR"
    )
    data_dir: str | None = Field(None, description="where data sets lie [$FEDMAN_DATA or ~/.cache/fedman]")
    augment: bool | None = Field(None, description="mirror and crop training images [natural images only]")
    partition: str = Field(
        "dir0.3",
        description="iid, dirX (Dirichlet), pathC (C classes each), natural, file:PATH, module:function [by data]",
    )
    partition_seed: Seed = Field(0, description="seed of the partition, apart from the run's")
    unbalanced: Annotated[float, Field(ge=0, le=5)] = Field(0.0, description="σ of log-normal client sizes")
    validation: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the training samples that is held out and evaluated in place of the test set"
    )
    clients: Count = Field(100, description="N, number of clients")
    participation: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="share of clients in a round")
    cohort: Literal["bernoulli", "fixed"] = Field("bernoulli", description="cohorts of random or of fixed size")
    schedule_seed: Seed = Field(0, description="seed of the cohorts, apart from the run's")

    model: str = Field("", description="model by name, or module:builder [by data set]")
    algorithm: str = Field(ALGORITHMS.default, description="federated algorithm by name, or module:Name")
    task: str = Field("", description="what is learnt, by name or module:Name [by data set; of arrays by targets]")
    penalty: str = Field(PENALTIES.default, description="what ζ weighs, by name or module:Name")
    zeta: NotNegative = Field(TRAINING.zeta, description="ζ, weight of the penalty; 0 = plain algorithm")
    aggregation: str = Field(
        AGGREGATIONS.default, description="what counts of the clients' uploads, by name or module:Name"
    )
    attack: str = Field(
        ATTACKS.default, description="what hostile clients do, in the simulator, by name or module:Name"
    )

    rounds: Count = Field(500, description="T, number of rounds")
    epochs: Epochs = Field(TRAINING.epochs, description="E, local epochs a round")
    batch_size: Count = Field(TRAINING.batch_size, description="B, samples a local step")
    optimizer: str = Field(OPTIMIZERS.default, description="local optimiser by name, or module:Name")
    keep_optimizer: bool = Field(TRAINING.keep_optimizer, description="clients keep the optimiser's state over rounds")
    batch_norm: BatchNorm = Field(
        TRAINING.batch_norm, description="batch-norm layers: average them, or local, each client its own (FedBN)"
    )
    lr: Positive = Field(TRAINING.lr, description="η_0, local learning rate before decay and warm-up")
    lr_schedule: LrSchedule = Field(
        TRAINING.lr_schedule, description="of the rate over rounds: decay, constant, cosine"
    )
    warmup: Annotated[int, Field(ge=0, le=10_000_000)] = Field(
        TRAINING.warmup, description="first rounds, in which the rate rises"
    )
    lr_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        TRAINING.lr_decay, description="factor on the rate every round"
    )
    weight_decay: NotNegative = Field(TRAINING.weight_decay, description="λ, L2 decay on every parameter")
    clip: Annotated[float, Field(gt=0, allow_inf_nan=True)] = Field(
        TRAINING.clip, description="C, bound on a gradient's norm; inf = none"
    )
    seed: Seed = Field(TRAINING.seed, description="initial weights, batch order, augmentation")

    target: Positive | None = Field(None, description="headline (accuracy in percent) to reach [by data set]")
    eval_every: Count = Field(1, description="rounds between evaluations of `all`")
    eval_others_every: Count = Field(10, description="rounds between evaluations of `sel` and `cloud`")
    precision: Literal["auto", "fp64", "fp32", "tf32", "bf16"] = Field(
        "auto", description="of products; auto: bf16 on CUDA, and for a large model on a CPU that has it; else fp32"
    )
    execution: Literal["auto", "kernels", "vmap", "branches", "plain"] = Field(
        "auto", description="how several clients are computed at once; auto: the fastest that serves the model"
    )
    deterministic: bool = Field(True, description="same seed, same bits on one GPU; false: the fastest kernels")
    chunk: Count | None = Field(None, description="clients worked on together [by model and device]")
    checkpoint_seconds: NotNegative = Field(60.0, description="least time between checkpoints; 0: after every round")
    keep_state: bool = Field(True, description="keep the last checkpoint, so that `rounds` can be raised later")
    log: str = Field("", description="trackers: tensorboard, mlflow, wandb or module:Name, joined by +")

    @property
    def source(self) -> tuple[str, str | None]:
        """The arguments of `fedman.data.load`."""
        return self.dataset, self.data_dir

    @property
    def method(self) -> str:
        """As the paper names it: FedDC, FedDC+MAN."""
        return ALGORITHMS[self.algorithm].title + (f"+{PENALTIES[self.penalty].title}" if self.zeta > 0 else "")

    @property
    def hyper(self) -> Hyper:
        """The hyper-parameters of the algorithm."""
        return self._hyper("algorithm")

    def make_algorithm(self) -> Algorithm:
        return ALGORITHMS[self.algorithm](**self._hyper("algorithm"))

    def make_optimizer(self) -> LocalOptimizer:
        return OPTIMIZERS[self.optimizer](**self._hyper("optimizer"))

    def make_penalty(self) -> Penalty:
        return PENALTIES[self.penalty](**self._hyper("penalty"))

    def make_aggregation(self) -> Aggregation:
        return AGGREGATIONS[self.aggregation](**self._hyper("aggregation"))

    def make_attack(self) -> Attack:
        return ATTACKS[self.attack](**self._hyper("attack"))

    def make_task(self) -> Task:
        return TASKS[self.task](**self._hyper("task"))

    def _hyper(self, kind: str) -> dict[str, Any]:
        return {key: getattr(self, key) for key in hyperparameters(PARTS[kind][getattr(self, kind)])}

    def flat(self) -> dict[str, bool | int | float | str]:
        """The keys that have a value, for `config.toml` and `summary.json`."""
        return {k: v for k, v in self.model_dump(exclude_none=True).items() if k not in UNSAID or v != UNSAID[k]}

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process as its keys: the class has fields for the parts it names, and is made for them."""
        return resolve, (self.flat(),)


KEYS = Config.model_fields
"""The keys that every run has, whatever its algorithm."""


@cache
def config_class(parts: tuple[type[Any], ...]) -> type[Config]:
    """`Config` with the hyper-parameters of these parts, which are their dataclass fields."""
    found: dict[str, Any] = {
        f.name: (hints("hyper-parameter", part, part.__name__)[f.name], Field(f.default, **f.metadata))
        for part in parts
        for f in fields(part)
        if f.name not in KEYS
    }
    return create_model("Config", __base__=Config, **found)


def registered() -> tuple[type[Any], ...]:
    """All parts that have a name, but for those of installed packages that cannot be imported."""
    parts: list[type[Any]] = []
    for registry in PARTS.values():
        for name in registry:
            with suppress(UserError):
                parts.append(registry[name])
    return tuple(parts)


@dataclass(frozen=True)
class Preset:
    """Settings under one name: values of keys, and hyper-parameters that depend on the other settings."""

    keys: Mapping[str, Any]
    hyper: Callable[[Config], Hyper] = lambda config: {}


def resolve(
    values: Mapping[str, Any],
    preset: Preset | None = None,
    *,
    data: Dataset | None = None,
    mistakes: Sequence[str] = (),
) -> Config:
    """A full configuration from a preset and given keys. All mistakes are reported together.

    `data` are a user's own, given in Python; `mistakes` are those already found there.
    """
    given = {**(preset.keys if preset else {}), **values}
    mistakes = list(mistakes)
    if data is not None and not given.get("task") and given.get("dataset") not in SPECS:
        task, advice = fitting(data.x_train, data.y_train)
        given["task"] = task or ""
        mistakes += [] if task else [f"task: the targets do not say which; {advice}"]
    parts, missing = _parts(given)
    config, wrong = _validate(config_class(parts), given)
    config = _fill_defaults(config)
    lost = bool(missing) and any(":" in str(given.get(kind, "")) for kind in PARTS)  # nobody knows what keys it has
    mistakes += [*(() if lost else _unknown_keys(given, config)), *wrong]
    mistakes += [f"{key}: has a NUL character" for key, value in given.items() if "\0" in str(value)]
    mistakes += [f"{key}: is not Unicode text" for key, value in given.items() if _has_surrogates(str(value))]
    mistakes += [*missing, *_check_names(config)]
    if preset and values.get("dataset") not in (None, own := preset.keys.get("dataset"), "") and own:
        mistakes.append(f"dataset: {config.dataset!r} is not that of the preset, {own}; leave one of them out")
    if len(mistakes) == 1:
        raise UserError(mistakes[0])
    if mistakes:
        more = [f"and {len(mistakes) - MAX_MISTAKES} more"] if len(mistakes) > MAX_MISTAKES else []
        raise UserError("\n".join([f"{len(mistakes)} mistakes", *mistakes[:MAX_MISTAKES], *more]))
    config = config.model_copy(update=_own_clients(given, config, data))
    of_preset = preset.hyper(config) if preset else {}
    return config.model_copy(update={k: v for k, v in of_preset.items() if k not in config.model_fields_set})


def _parts(given: Mapping[str, Any]) -> tuple[tuple[type[Any], ...], list[str]]:
    """The parts that these keys name, and a line for each that is not there; all of its kind stand in for it."""
    parts: list[type[Any]] = []
    mistakes: list[str] = []
    owner: dict[str, str] = {}
    spec = SPECS.get(str(given.get("dataset", KEYS["dataset"].default)))
    for kind, registry in PARTS.items():
        name = str(given.get(kind) or getattr(spec, kind, registry.default))
        try:
            part = registry[name]
        except UserError as error:
            mistakes.append(str(error))
            parts += registry.built_in.values()
            continue
        parts.append(part)
        for key in hyperparameters(part):
            if key in KEYS and not (kind == "penalty" and key == "zeta"):
                mistakes.append(f"{kind}: {name}'s hyper-parameter {key} has the name of a key of every run; rename it")
            elif owner.setdefault(key, kind) != kind:
                mistakes.append(f"{kind}: {name}'s hyper-parameter {key} is one of the {owner[key]}'s too; rename it")
    return tuple(parts), mistakes


def _has_surrogates(text: str) -> bool:
    """Whether a word of the command line was no UTF-8: it could not be written to `config.toml`."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def parse_value(key: str, text: str) -> Any:
    """The value of one key as the configuration holds it: "0.150" is 0.15, "false" is False. Of a key that no part of
    fedman's own has it is the text."""
    parsed, mistakes = _validate(config_class(registered()), {key: text})
    if mistakes:
        raise UserError(mistakes[0])
    return getattr(parsed, key, text)


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
    found = ((str(e["loc"][0]), *_wanted(e["msg"], e["input"])) for e in error.errors())
    return {key: f"{key}: {wanted}, not {given}" for key, wanted, given in found}


def _wanted(message: str, value: object) -> tuple[str, str]:
    """What is allowed, in plainer words than pydantic's, and what was given."""
    wanted = message.removeprefix("Input ").partition(", unable to ")[0]
    for theirs, ours in PLAIN_WORDS.items():
        wanted = wanted.replace(theirs, ours)
    several = isinstance(value, str) and ("," in value or _RANGE.fullmatch(value))
    return wanted, shown(value) + ("; several values, as 0,1,2, are for fedman sweep" if several else "")


def _fill_defaults(config: Config) -> Config:
    """The configuration with every default that depends on the data set; a user's own arrays can have any shape."""
    spec = SPECS.get(config.dataset)
    defaults: dict[str, Any] = {"model": ANY_SHAPE, "task": TASKS.default}
    if spec:
        defaults = {key: getattr(spec, key) for key in ("model", "task", "target", "augment", "partition", "clients")}
    given = config.model_fields_set
    return config.model_copy(
        update={k: v for k, v in defaults.items() if k not in given or getattr(config, k) in (None, "")}
    )


def _own_clients(given: Mapping[str, Any], config: Config, data: Dataset | None) -> dict[str, Any]:
    """Partition and number of clients, where no key says them but the data or the partition do."""
    source = config.dataset if data is None else data
    found: dict[str, Any] = {}
    if "partition" not in given and natural_clients(source):
        found["partition"] = "natural"
    elif "partition" not in given and not _has_labels(config, data):
        found["partition"] = "iid"
    name = found.get("partition", config.partition)
    if "clients" not in given and rules.parse(name).kind not in rules.RULES:
        from fedman.data import partition

        count = partition.given_clients(name, source)
        found |= {"clients": count} if count else {}
    return found


def _has_labels(config: Config, data: Dataset | None) -> bool:
    """Whether targets are class labels, which the default partition splits; of files not yet read, as the task says."""
    if data is not None:
        return data.y_train.ndim == 1 and data.y_train.dtype.kind in "iu"
    return config.dataset in SPECS or issubclass(TASKS[config.task], Classification)


def _unknown_keys(given: Mapping[str, Any], config: Config) -> Iterable[str]:
    """Keys that are neither those of every run nor hyper-parameters of its algorithm."""
    own = type(config).model_fields
    foreign = {key: value for key, value in given.items() if key not in own}
    if not foreign:
        return
    parts = registered()
    known = config_class(parts).model_fields
    for key, value in foreign.items():
        if key in OTHER_WORDS:
            yield f"{key}: no such key; fedman's is {OTHER_WORDS[key]}"
        elif key not in known:
            yield f"{key}: no such key{did_you_mean(key, [*own, *known]) or '; see fedman list'}"
        elif value is not None:
            owner = next(part for part in parts if key in hyperparameters(part))
            kind = next(kind for kind in PARTS if issubclass(owner, PARTS[kind].base))
            name = getattr(config, kind)
            hyper = ", ".join(hyperparameters(PARTS[kind][name]))
            yield f"{key}: {name} has no such hyper-parameter ({f'it has {hyper}' if hyper else 'it has none'})"


def _check_names(config: Config) -> Iterable[str]:
    """What one field cannot check alone: names in registries, and settings that do not go together."""
    if config.model not in (*MODELS, CUSTOM) and ":" not in config.model:
        yield f"model: no model named {config.model!r}{nearest(config.model, MODELS)}"
    checks = (
        lambda: config.dataset == CUSTOM or is_path(config.dataset) or lookup(config.dataset),
        lambda: rules.parse(config.partition),
        lambda: trackers.parse(config.log),
        lambda: _check_target(config),
        lambda: _check_optimizer(config),
        lambda: _check_penalty(config),
    )
    for check in checks:
        try:
            check()
        except UserError as error:
            yield str(error)


def _check_target(config: Config) -> None:
    task = _found(config, "task")
    if task is not None and task.headline == "accuracy" and (config.target or 0) > 100:
        raise UserError(f"target: should be less than or equal to 100, not {config.target:g}")


def _check_optimizer(config: Config) -> None:
    if _found(config, "algorithm") is None or _found(config, "optimizer") is None:
        return
    if ALGORITHMS[config.algorithm].presumes_sgd and not config.make_optimizer().is_plain_sgd:
        wanted = "use optimizer=sgd without momentum, with decay outside the clip"
        raise UserError(f"optimizer: the formulas of {config.algorithm} presume plain SGD; {wanted}")


def _check_penalty(config: Config) -> None:
    if _found(config, "penalty") is not None:
        config.make_penalty().check(config.model)


def _found(config: Config, kind: str) -> Any:
    """The class of a part; None where there is none, which is told elsewhere."""
    try:
        return PARTS[kind][getattr(config, kind)]
    except UserError:
        return None
