"""Checks before training that the parts of a run keep their contracts, each tried on models of two numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from fedman.aggregation import Aggregation
from fedman.algorithms import Algorithm, Local, State
from fedman.errors import UserError, describe
from fedman.optimizers import LocalOptimizer
from fedman.training.attacks import Attack

MIXED = "gives a client something else among others than alone; norms and sums run over the last axis, nothing is drawn"


def trial(clients: int, size: int) -> Local:
    """The settings of a step with which an algorithm is played on models of `size` numbers."""
    return Local(
        lr=torch.tensor(0.1),
        lr0=0.1,
        decay=0.01,
        clip=1.0,
        p=torch.full((clients, 1), 1.5),
        steps=torch.full((clients, 1), 3.0),
        is_weight=torch.ones(size, dtype=torch.bool),
    )


def check_algorithm(algorithm: Algorithm) -> Algorithm:
    """`algorithm`, once played by three clients on models of two numbers: it returns what it must and writes to none of
    its inputs."""
    name, hp = f"algorithm: {type(algorithm).__name__}", trial(3, 2)
    if missing := [key for key in ("w", algorithm.cloud) if key not in algorithm.server]:
        raise UserError(f"{name}.server has no {missing[0]!r}, the server's model")
    inputs: list[tuple[str, Tensor, Tensor]] = []

    def given(where: str, vectors: State) -> dict[str, Tensor]:
        inputs.extend((f"{where}[{key!r}]", v, v.clone()) for key, v in vectors.items())
        return dict(vectors)

    w = torch.tensor([[0.5, -0.2], [0.1, 0.4], [-0.3, 0.2]])
    server = given("server", {key: torch.full((2,), 0.3) for key in algorithm.server})
    memory = given("client", {key: torch.full_like(w, 0.1) for key in algorithm.client})
    scratch = given("client", {key: torch.zeros_like(w) for key in algorithm.scratch})
    inputs.append(("w", w, w.clone()))
    stage = "begin"
    try:
        kept = {**memory, **given("client", algorithm.begin(server, memory, hp))}
        stage = "step"
        after = algorithm.step(w, torch.cos, server, {**kept, **scratch}, hp)
        after, carried = after if isinstance(after, tuple) else (after, scratch)
        _require_shape(name, "step returns w", after, (3, 2))
        _require_vectors(name, "step returns the vectors", carried, scratch, (3, 2))
        stage = "finish"
        new, upload = algorithm.finish(after, server, {**kept, **carried}, hp)
        _require_vectors(name, "finish returns the memory", new, memory, (3, 2))
        _require_vectors(name, "finish returns the upload", upload, {"w", *upload}, (3, 2))
        stage = "update"
        done = algorithm.update(server, {key: v.mean(0) for key, v in upload.items()}, 0.5)
        _require_vectors(name, "update returns the vectors", done, server, (2,))
        for key, v, before in inputs:
            if not torch.equal(v, before):
                raise UserError(f"{name} writes to its input {key}; a step must return new tensors")
        together = _local_work(algorithm, w, server)
        stage = "step of a client alone"
        alone = [_local_work(algorithm, row, server) for row in w.split(1)]
        for what, *rows in zip(together, *alone, strict=True):
            if not torch.allclose(what, torch.cat(rows), equal_nan=True):
                raise UserError(f"{name} {MIXED}")
    except UserError:
        raise
    except Exception as error:  # a user's algorithm may raise anything
        raise UserError(f"{name}.{stage} fails ({describe(error)})") from error
    return algorithm


@cache
def can_be_stacked(kind: type[Algorithm]) -> bool:
    """Whether the local work of such an algorithm can have rows, one for each client, in the place of a server's vector
    and a column [S, 1] in the place of a number: runs that differ in them are then stacked."""
    w = torch.tensor([[0.5, -0.2], [0.1, 0.4], [-0.3, 0.2]])
    try:
        one = kind()
        server = {key: torch.full((2,), 0.3) for key in one.server}
        numbers = {key: v for key, v in vars(one).items() if not isinstance(v, bool | str)}
        stacked = replace(one, **{key: torch.full((3, 1), float(v)) for key, v in numbers.items()})
        found = _local_work(stacked, w, {key: v.expand(3, -1) for key, v in server.items()})
        wanted = _local_work(one, w, server)
        return all(torch.allclose(*each, equal_nan=True) for each in zip(found, wanted, strict=True))
    except Exception:  # a user's algorithm may raise anything
        return False


def _local_work(algorithm: Algorithm, w: Tensor, server: State) -> list[Tensor]:
    """What a step and the end of the local work give for these clients."""
    hp = trial(*w.shape)
    memory = {key: torch.full_like(w, 0.1) for key in algorithm.client}
    kept = {**memory, **algorithm.begin(server, memory, hp)}
    scratch = {key: torch.zeros_like(w) for key in algorithm.scratch}
    after = algorithm.step(w, torch.cos, server, {**kept, **scratch}, hp)
    after, carried = after if isinstance(after, tuple) else (after, scratch)
    new, upload = algorithm.finish(after, server, {**kept, **carried}, hp)
    return [after, *carried.values(), *new.values(), *upload.values()]


def check_optimizer(optimizer: LocalOptimizer) -> LocalOptimizer:
    """`optimizer`, once tried on three clients' models of two numbers, as an algorithm is."""
    name, w = f"optimizer: {type(optimizer).__name__}", torch.tensor([[0.5, -0.2], [0.1, 0.4], [-0.3, 0.2]])
    stage = "init"
    try:
        state = dict(optimizer.init(w))
        for key, v in state.items():
            if not isinstance(v, Tensor) or v.ndim != 2 or len(v) != 3:
                raise UserError(
                    f"{name}.init returns {key} with {kind_of(v)}; (3, ...), a row a client, is wanted here"
                )
        inputs = {"w": w, "g": w.cos(), **{f"state[{key!r}]": v for key, v in state.items()}}
        before = {key: v.clone() for key, v in inputs.items()}
        stage = "update"
        after, new = optimizer.update(w, inputs["g"], state, trial(3, 2), 0.01)
        _require_shape(name, "update returns w", after, w.shape)
        _require_names(name, "update returns the state", new, state)
        for key, v in new.items():
            _require_shape(name, f"update returns {key}", v, state[key].shape)
        for key, v in inputs.items():
            if not torch.equal(v, before[key]):
                raise UserError(f"{name} writes to its input {key}; a step must return new tensors")
        rows = [[v[k : k + 1] for v in inputs.values()] for k in range(3)]
        alone = [optimizer.update(w, g, dict(zip(state, own, strict=True)), trial(1, 2), 0.01) for w, g, *own in rows]
        for what, *each in zip([after, *new.values()], *([v, *own.values()] for v, own in alone), strict=True):
            if not torch.allclose(what, torch.cat(each), equal_nan=True):
                raise UserError(f"{name} {MIXED}")
    except UserError:
        raise
    except Exception as error:  # a user's optimiser may raise anything
        raise UserError(f"{name}.{stage} fails ({describe(error)})") from error
    return optimizer


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
        raise UserError(f"aggregation: {name}.aggregate fails ({describe(error)})") from error
    if not isinstance(found, Mapping) or set(found) != set(upload):
        got = ", ".join(map(str, found)) or "nothing" if isinstance(found, Mapping) else type(found).__name__
        raise UserError(
            f"aggregation: {name} returns {got} for uploads of {', '.join(upload)}; the same names are wanted"
        )
    for key, v in found.items():
        if not isinstance(v, Tensor) or v.shape not in ((2,), (3, 2)):
            raise UserError(f"aggregation: {name} returns {key} with {kind_of(v)}; (2,) or (3, 2) is wanted here")
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
        raise UserError(f"attack: {name}.upload fails ({describe(error)})") from error
    if not isinstance(found, Tensor) or found.shape != own.shape:
        raise UserError(f"attack: {name}.upload returns {kind_of(found)}; {tuple(own.shape)} is wanted here")
    return attack


def kind_of(value: object) -> str:
    """The shape of a tensor, the type of anything else."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _require_shape(name: str, what: str, value: object, shape: tuple[int, ...]) -> None:
    if not isinstance(value, Tensor) or value.shape != shape:
        raise UserError(f"{name}.{what} with {kind_of(value)}; {tuple(shape)} is wanted here")


def _require_names(name: str, what: str, found: State, wanted: Iterable[str]) -> None:
    have, want = set(found), set(wanted)
    if have != want:
        listed = [", ".join(sorted(each)) or "nothing" for each in (have, want)]
        raise UserError(f"{name}.{what} {listed[0]}; wanted is {listed[1]}")


def _require_vectors(name: str, what: str, found: State, wanted: Iterable[str], shape: tuple[int, ...]) -> None:
    _require_names(name, what, found, wanted)
    for key, value in found.items():
        _require_shape(name, f"{what.split(' the ')[0]} {key}", value, shape)
