"""Checks before training that the parts of a run fit together: one line that says which does not, and why."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedman.aggregation import Aggregation
from fedman.algorithms import Algorithm, Local
from fedman.data.dataset import Dataset
from fedman.errors import UserError
from fedman.tasks import Task
from fedman.training.attacks import Attack
from fedman.training.batches import Samples

RESERVED = ("loss", "round", "cohort", "quarantined", "lr", "penalty", "test_loss", "seconds", "clients", "attackers")
"""Names in the records that a score cannot have."""


def check_fit(task: Task, data: Dataset, model: nn.Module, samples: Samples) -> None:
    """That the model takes the samples, and the task its output and the targets: tried on up to two samples."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    x = samples.inputs(samples.x[:2], parameter.dtype).to(parameter.device)
    y = samples.y[:2].to(parameter.device)
    name = type(model).__name__
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            output = model(x)
        except UserError:
            raise
        except Exception as error:  # a user's module may raise anything
            raise UserError(f"model: {name} cannot take samples of shape {_shape(x)} ({_reason(error)})") from error
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != len(x):
        raise UserError(
            f"model: {name} returns {_got(output)} for {len(x)} samples; a tensor [{len(x)}, ...] is wanted"
        )
    task.check(data, tuple(output.shape))
    kind = type(task).__name__
    try:
        found = {"loss": task.loss(output, y), **(scores := dict(task.scores(output, y)))}
    except Exception as error:  # so may a user's task
        shapes = f"outputs {_shape(output)} and targets {_shape(y)} a sample"
        raise UserError(f"task: {kind} fails for {shapes} ({_reason(error)})") from error
    for what, value in found.items():
        if not isinstance(value, Tensor) or value.shape != (len(x),):
            raise UserError(
                f"task: {kind}'s {what} has {_got(value)} for {len(x)} samples; one number a sample is wanted"
            )
    if taken := [name for name in scores if name in RESERVED]:
        raise UserError(f"task: a score cannot be called {taken[0]}; choose another name")
    figures = task.summarise({"loss": 1.0, **dict.fromkeys(scores, 1.0)})
    if task.headline not in figures:
        raise UserError(f"task: the headline {task.headline!r} is not one of {kind}'s figures: {', '.join(figures)}")


def check_algorithm(algorithm: Algorithm) -> Algorithm:
    """`algorithm`, once played on models of two numbers: it returns what it must and writes to none of its inputs."""
    name = type(algorithm).__name__
    server = {key: torch.full((2,), 0.3) for key in algorithm.server}
    memory = {key: torch.full((2, 2), 0.1) for key in algorithm.client}
    scratch = {key: torch.zeros(2, 2) for key in algorithm.scratch}
    w = torch.tensor([[0.5, -0.2], [0.1, 0.4]])
    inputs = {
        "w": w,
        **{f"server[{k!r}]": v for k, v in server.items()},
        **{f"client[{k!r}]": v for k, v in memory.items()},
    }
    before = {key: v.clone() for key, v in inputs.items()}
    stage = "begin"
    try:
        kept = {**memory, **algorithm.begin(server, memory, _HP)}
        stage = "step"
        after = algorithm.step(w, torch.cos, server, {**kept, **scratch}, _HP)
        after, carried = after if isinstance(after, tuple) else (after, scratch)
        _same(name, "step returns w", after, (2, 2))
        _names(name, "step returns the vectors", carried, scratch)
        stage = "finish"
        new, upload = algorithm.finish(after, server, {**kept, **carried}, _HP)
        _names(name, "finish returns the memory", new, memory)
        _names(name, "finish returns the upload", upload, {"w": w}, more=True)
        stage = "update"
        done = algorithm.update(server, {key: v.mean(0) for key, v in upload.items()}, 0.5)
        _names(name, "update returns the vectors", done, server)
        for key in algorithm.server:
            _same(name, f"update returns {key}", done[key], (2,))
    except UserError:
        raise
    except Exception as error:  # a user's algorithm may raise anything
        raise UserError(f"algorithm: {name}.{stage} fails ({_reason(error)})") from error
    for key, v in inputs.items():
        if not torch.equal(v, before[key]):
            raise UserError(f"algorithm: {name} writes to its input {key}; a step must return new tensors")
    return algorithm


def check_aggregation(rule: Aggregation) -> Aggregation:
    """`rule`, once tried on three uploads of models of two numbers."""
    name = type(rule).__name__
    upload = {
        key: torch.tensor([[0.5, -0.2], [0.1, 0.4], [0.3, 0.3]]) + shift for key, shift in (("w", 0.0), ("h", 1.0))
    }
    share, server = torch.ones(3, dtype=torch.float64), {key: torch.full((2,), 0.3) for key in upload}
    before = {key: v.clone() for key, v in upload.items()}
    try:
        found = rule.aggregate(upload, share, server)
    except Exception as error:  # a user's rule may raise anything
        raise UserError(f"aggregation: {name}.aggregate fails ({_reason(error)})") from error
    if not isinstance(found, Mapping) or set(found) != set(upload):
        got = ", ".join(map(str, found)) or "nothing" if isinstance(found, Mapping) else type(found).__name__
        raise UserError(
            f"aggregation: {name} returns {got} for uploads of {', '.join(upload)}; the same names are wanted"
        )
    for key, v in found.items():
        if not isinstance(v, Tensor) or v.shape not in ((2,), (3, 2)):
            raise UserError(f"aggregation: {name} returns {key} with {_got(v)}; (2,) or (3, 2) is wanted here")
        if not torch.equal(upload[key], before[key]):
            raise UserError(f"aggregation: {name} writes to its input upload[{key!r}]; a rule must return new tensors")
    return rule


def check_attack(attack: Attack) -> Attack:
    """`attack`, once tried on models of two numbers."""
    name = type(attack).__name__
    own, honest, theta = torch.full((3, 2), 0.5), torch.full((4, 2), 0.1), torch.full((2,), 0.3)
    try:
        found = attack.upload(own, honest, theta)
    except Exception as error:  # a user's attack may raise anything
        raise UserError(f"attack: {name}.upload fails ({_reason(error)})") from error
    if not isinstance(found, Tensor) or found.shape != own.shape:
        raise UserError(f"attack: {name}.upload returns {_got(found)}; {tuple(own.shape)} is wanted here")
    return attack


def _got(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _same(name: str, what: str, value: object, shape: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor) or value.shape != shape:
        raise UserError(f"algorithm: {name}.{what} with {_got(value)}; {shape} is wanted here")


def _names(name: str, what: str, found: object, wanted: object, more: bool = False) -> None:
    have, want = set(found), set(wanted)  # type: ignore[call-overload]
    if not (want <= have if more else want == have):
        listed = [", ".join(sorted(each)) or "nothing" for each in (have, want)]
        raise UserError(f"algorithm: {name}.{what} {listed[0]}; wanted is {listed[1]}")


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape[1:]))


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


_HP = Local(
    lr=torch.tensor(0.1),
    lr0=0.1,
    decay=0.01,
    clip=1.0,
    p=torch.full((2, 1), 1.5),
    steps=torch.full((2, 1), 3.0),
    is_weight=torch.ones(2, dtype=torch.bool),
)
