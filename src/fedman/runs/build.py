"""From a configuration and a data set to what plays its rounds: federations, an executor, an evaluator."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedman.algorithms import ALGORITHMS, Algorithm
from fedman.backends.in_process import InProcess, default_chunk
from fedman.config import Config
from fedman.data import Dataset, partition, validation
from fedman.data.images import holds_images
from fedman.data.rules import RULES, parse
from fedman.errors import UserError
from fedman.execution.base import check_model, is_large
from fedman.execution.choice import choose
from fedman.execution.device import pick_precision
from fedman.execution.executor import Executor
from fedman.models import build as build_model
from fedman.models import takes_ids
from fedman.models.parameters import ParameterLayout, batch_norm_entries, flatten, flatten_buffers
from fedman.tasks import Task
from fedman.training.attacks import relabelled
from fedman.training.batches import Samples
from fedman.training.check_fit import check_fit, warn_of_single_samples
from fedman.training.check_parts import (
    can_be_stacked,
    check_aggregation,
    check_algorithm,
    check_attack,
    check_optimizer,
)
from fedman.training.evaluate import Evaluator
from fedman.training.federation import Assignment, Federation
from fedman.training.settings import Training


def stack_key(config: Config) -> tuple[object, ...]:
    """Runs with the same key can share a chunk: all that decides the work is the same, but for seed, partition, ζ and
    the algorithm's other numbers (a switch or a word of the algorithm decides the work). An algorithm for which they
    cannot differ has no run that shares a chunk.

    Runs in a chunk share the labels and what they are evaluated on: where attackers alter theirs, the seed and the
    partition say which; where samples are held out, the partition's seed does."""
    if not can_be_stacked(ALGORITHMS[config.algorithm]):
        return tuple(sorted(config.flat().items()))
    numbers = [k for k, v in config.hyper.items() if not isinstance(v, bool | str)]
    samples = () if config.make_attack().relabels else ("seed", "partition", "unbalanced")
    seeds = () if config.make_attack().relabels or config.validation else ("partition_seed",)
    apart = (*samples, *seeds, "zeta", *numbers)
    return tuple(sorted((k, v) for k, v in config.flat().items() if k not in apart))


@dataclass(frozen=True)
class Built:
    """Runs that share a model's architecture, a data set and a device."""

    federations: list[Federation]
    executor: Executor
    evaluator: Evaluator
    precision: str
    in_process: InProcess  # the backend that trains the clients here

    def rehearse(self, rounds: Iterable[Sequence[Assignment]], w: Tensor) -> None:
        """Get ready for these rounds and for evaluating models as `w`: GPU kernels are compiled side by side."""

        def work() -> None:
            with suppress(Exception):  # a user's algorithm may refuse values that are not computed
                self.in_process.rehearse(rounds)
                self.evaluator.rehearse(w)

        self.executor.execution.rehearse(work)


def build(
    configs: Sequence[Config],
    data: Dataset,
    device: str,
    *,
    stopping: threading.Event | None = None,
    model: nn.Module | None = None,
    parts: Sequence[np.ndarray] | None = None,
    whole_run: bool = False,
) -> Built:
    """The runs of several configurations with one `stack_key`, or of one.

    `model` replaces the configured one; `parts` are the clients' samples where they are not the configured partition.
    `whole_run`: all rounds are to be played in this process, so that compiling can pay.
    """
    first, where = configs[0], torch.device(device)
    task, held = first.make_task(), None
    if first.validation:
        held = validation.held_out(data.y_train, first.validation, first.partition_seed)
        data = validation.in_place_of_test(data, held)
    models = [model if model is not None else initial_model(c.model, data, task, c.seed) for c in configs]
    check_model(models[0])
    samples = on_device(data, device, data.augment if first.augment is None else first.augment, takes_ids(models[0]))
    layout = ParameterLayout.of(models[0])
    precision = pick_precision(first.precision, device, is_large(layout.size))
    dtype = torch.float64 if precision == "fp64" else torch.float32
    check_fit(task, data, models[0], samples, dtype)
    split = [
        parts
        if parts is not None
        else partition.clients_of(data, c.partition, c.clients, seed=c.partition_seed, sigma=c.unbalanced)
        for c in configs
    ]
    if held is not None:
        split = [validation.without(each, held) for each in split]
    local = batch_norm_entries(models[0]).to(where) if first.batch_norm == "local" else None
    if local is not None and not local.any():
        raise UserError(f"batch_norm: local, but {type(models[0]).__name__} has no batch-norm layer; use average")
    algorithms = [check_algorithm(config.make_algorithm()) for config in configs]
    optimizer = check_optimizer(first.make_optimizer())
    aggregation, attack = check_aggregation(first.make_aggregation()), check_attack(first.make_attack())
    attackers = [attack.draw(config.seed, len(each)) for config, each in zip(configs, split, strict=True)]
    owned = [replace(samples, parts=each) for each in split]
    owned = [relabelled(attack, who, each, data.classes) for who, each in zip(attackers, owned, strict=True)]
    for each in owned:
        warn_of_single_samples(models[0], each, first.batch_size)
    chunk = first.chunk or default_chunk(layout.size, where)
    execution = choose(
        models[0],
        task,
        first.make_penalty(),
        precision,
        where,
        chunk,
        (samples.inputs(samples.x[:2], dtype), samples.y[:2]),
        samples.shape if samples.images else (),
        first.execution,
        sum(gradients(config, algorithms[0], len(samples.x)) for config in configs) if whole_run else 0,
        max(config.zeta for config in configs),
        any(len(part) != len(split[0][0]) or len(part) % first.batch_size for each in split for part in each),
    )
    if not execution.stacks and where.type == "cpu":
        chunk = 1
    executor = Executor(execution, where, stopping or threading.Event())
    stacked = len(configs) > 1 and chunk > 1
    one_shape = executor.graphs is not None or stacked  # a graph and a stack of runs want draws of one shape
    longest = max(len(part) for each in split for part in each) if one_shape else None
    federations = [
        Federation(
            algorithm=algorithm,
            optimizer=optimizer,
            samples=own,
            training=Training(**{f.name: getattr(config, f.name) for f in fields(Training)}),
            initial=flatten(start).to(where, dtype),
            initial_buffers=flatten_buffers(start).to(where, dtype) if execution.buffers.names else None,
            is_weight=layout.is_weight().to(where),
            relative_size=relative_sizes([len(p) for p in own.parts]),
            ids=range(len(own.parts)),
            own=local,
            longest=longest,
            image_layout=execution.image_layout,
            fused=execution.fused,
            aggregation=aggregation,
            attack=attack,
            attackers=who,
        )
        for config, algorithm, own, who, start in zip(configs, algorithms, owned, attackers, models, strict=True)
    ]
    # of clients that have models of their own, only those that the data's test samples belong to are tested with them
    theirs = parse(first.partition).kind not in RULES and len(data.test_parts or ()) == first.clients
    tests = data.test_parts if theirs or local is None else None
    evaluator = Evaluator(executor, samples, dtype, parts=tests)
    return Built(federations, executor, evaluator, precision, InProcess(executor, chunk))


def gradients(config: Config, algorithm: Algorithm, samples: int) -> int:
    """About how many gradients of single clients a run computes."""
    batches = max(1, round(samples / config.clients / config.batch_size))
    steps = config.rounds * config.participation * config.clients * config.epochs * batches
    return round(steps * algorithm.gradients_per_step)


def relative_sizes(sizes: Sequence[int]) -> Tensor:
    """p_k = n_k·N / Σn in float64: the clients' sizes over their mean."""
    n = torch.tensor(sizes, dtype=torch.float64)
    return n / n.mean()


def on_device(data: Dataset, device: str, augment: bool, ids: bool) -> Samples:
    """A data set's samples on the device, not yet split over clients. Whole numbers stay so where the model takes
    `ids`."""
    x, y, x_test, y_test = (
        torch.as_tensor(np.require(a, requirements="W"), device=device)  # torch warns of arrays that are only read
        for a in (data.x_train, data.y_train, data.x_test, data.y_test)
    )
    if not x.is_floating_point() and not holds_images(x) and not (ids if data.ids is None else data.ids):
        x, x_test = x.float(), x_test.float()
    samples = Samples(x, y, x_test, y_test, [], data.mean, data.std, augment)
    if augment and not samples.images:
        raise UserError(f"augment: {data.name} holds no images of bytes (uint8); use augment=false")
    return samples


def initial_model(name: str, data: Dataset, task: Task, seed: int) -> nn.Module:
    """The model with PyTorch's default initialisation under `seed`, always drawn on the CPU and in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build_model(name, data.shape, task.outputs(data))
    finally:
        torch.set_default_dtype(before)
