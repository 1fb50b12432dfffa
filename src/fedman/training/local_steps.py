"""The local work of a chunk of clients: K steps on `[S, P]`, in a loop or as replays of a captured graph.

A chunk can hold clients of several runs, stacked row on row (`stack`), since nothing in a step connects one row with
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedman.algorithms import Algorithm, Local, State
from fedman.execution.base import Batch, Execution
from fedman.execution.cuda_graphs import Inputs, Steps, Tensors
from fedman.execution.executor import Executor
from fedman.optimizers import Descent, LocalOptimizer
from fedman.training.batches import Batches
from fedman.training.settings import BUFFERS

STATE = "optimizer."
"""Before the names of the optimiser's vectors, among those carried on and among a client's memory."""


@dataclass(frozen=True)
class LocalWork:
    """Everything the steps of S clients need."""

    batches: Batches
    server: State  # [P] each; [S, P] where runs are stacked, or where clients have parts of the model of their own
    memory: State  # [S, P] each: the clients' own, and what the algorithm's `begin` made
    hp: Local
    algorithm: Algorithm  # a hyper-parameter in which stacked runs differ is a column [S, 1]
    optimizer: LocalOptimizer
    zeta: float | Tensor  # ζ, weight of the penalty; [S] where runs are stacked
    buffers: Tensor | None = None  # [S, Q], those of the models before the first step; None: they have none

    def __len__(self) -> int:
        return len(self.hp.p)

    def dummies(self, count: int) -> LocalWork:
        """The work of the first client, `count` times: padding whose results are thrown away."""

        def rows(v: Tensor) -> Tensor:
            return v[:1].expand(count, *v.shape[1:])

        hp = replace(self.hp, p=rows(self.hp.p), steps=rows(self.hp.steps))
        memory = {name: rows(v) for name, v in self.memory.items()}
        server = {name: rows(v) if v.ndim > 1 else v for name, v in self.server.items()}
        buffers = None if self.buffers is None else rows(self.buffers)
        batches = self.batches.dummies(count)
        return replace(self, batches=batches, server=server, memory=memory, hp=hp, buffers=buffers)


def stack(works: Sequence[LocalWork]) -> LocalWork:
    """The rows of several runs as one: the same algorithm, model and training, but for numbers of the algorithm's
    step, ζ, seed and partition."""
    if len(works) == 1:
        return works[0]
    first = works[0]

    def rows(values: Sequence[float]) -> Tensor:
        return torch.cat([first.hp.lr.new_full((len(j),), v) for j, v in zip(works, values, strict=True)])

    given = {name: [getattr(j.algorithm, name) for j in works] for name in vars(first.algorithm)}
    own = {name: rows(values)[:, None] for name, values in given.items() if len(set(values)) > 1}
    hp = replace(first.hp, p=torch.cat([j.hp.p for j in works]), steps=torch.cat([j.hp.steps for j in works]))
    return LocalWork(
        Batches.stacked([j.batches for j in works]),
        {name: torch.cat([j.server[name].expand(len(j), -1) for j in works]) for name in first.server},
        {name: torch.cat([j.memory[name] for j in works]) for name in first.memory},
        hp,
        replace(first.algorithm, **own),
        first.optimizer,
        rows([float(j.zeta) for j in works]),
        torch.cat([j.buffers for j in works if j.buffers is not None]) if first.buffers is not None else None,
    )


@dataclass(frozen=True)
class LocalResult:
    """The results of the steps of S clients."""

    w: Tensor  # [S, P], the final models
    carried: State  # the last values of the algorithm's `scratch`, of the optimiser's state and of the buffers
    figures: dict[str, Tensor]  # [S] each: the mean "loss" over a client's steps, and the penalty's terms

    def split(self, sizes: Sequence[int]) -> list[LocalResult]:
        """The results of consecutive groups of clients."""
        w, names = self.w.split(list(sizes)), ("carried", "figures")
        carried, figures = ({n: v.split(list(sizes)) for n, v in getattr(self, name).items()} for name in names)
        return [
            LocalResult(w[i], {n: v[i] for n, v in carried.items()}, {n: v[i] for n, v in figures.items()})
            for i in range(len(sizes))
        ]


def run_local_steps(work: LocalWork, executor: Executor) -> LocalResult:
    """All steps of all clients."""
    carry, figures = executor.run(steps_of(work, executor.model))
    return LocalResult(carry["w"], {name: v for name, v in carry.items() if name not in ("w", "loss")}, figures)


def steps_of(work: LocalWork, model: Execution) -> Steps:
    """The steps and their figures as pure functions of tensors, fit for captured graphs.

    The penalty's terms are those of the final model on the client's first batch, whether ζ is zero or not.
    """
    w = work.server["w"].expand(len(work), -1)
    carry = {"w": w, "loss": w.new_zeros(len(work))}
    zero = w.new_zeros(()).expand_as(w)
    carry |= {name: work.memory.get(name, zero) for name in work.algorithm.scratch}
    carry |= {STATE + name: work.memory.get(STATE + name, v) for name, v in work.optimizer.init(w).items()}
    carry |= {} if work.buffers is None else {BUFFERS: work.buffers}
    numbers = {"zeta": work.zeta, **vars(work.algorithm)}
    own = {name: v for name, v in numbers.items() if isinstance(v, Tensor)}
    inputs = {
        "batches": work.batches.tensors,
        "server": work.server,
        "memory": work.memory,
        "hp": {"lr": work.hp.lr, "p": work.hp.p, "steps": work.hp.steps},
        "own": own,
    }

    def step(inputs: Inputs, j: int | Tensor, carry: Tensors) -> Tensors:
        batches, hp = work.batches.over(inputs["batches"]), replace(work.hp, **inputs["hp"])  # type: ignore[arg-type]
        own = dict(inputs["own"])
        zeta = own.pop("zeta", work.zeta)
        algorithm = replace(work.algorithm, **own)
        now = LocalWork(batches, inputs["server"], inputs["memory"], hp, algorithm, work.optimizer, zeta)
        return _step(now, model, batches.at(j), batches.active(j), carry)

    def figures(inputs: Inputs, first: int | Tensor, carry: Tensors) -> Tensors:
        batch = work.batches.over(inputs["batches"]).at(first)._replace(buffers=carry.get(BUFFERS))
        return {"loss": carry["loss"] / inputs["hp"]["steps"][:, 0], **model.penalty_terms(carry["w"], batch)}

    fixed = tuple((name, v) for name, v in numbers.items() if name not in own)
    return Steps(step, inputs, carry, work.batches.steps, fixed, figures)


def _step(work: LocalWork, model: Execution, batch: Batch, active: Tensor | None, carry: Tensors) -> Tensors:
    """One local step; clients that are not `active` any more stay where they are.

    The loss and the new buffers are those of the step's first gradient.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    batch = batch._replace(x=model.prepare(batch.x), buffers=carry.get(BUFFERS))

    def grad(w: Tensor) -> Tensor:
        gradient, *rest = model.gradient(w, batch, work.zeta)
        seen.append((rest[0], rest[1]))
        return gradient

    state = {name.removeprefix(STATE): v for name, v in carry.items() if name.startswith(STATE)}
    scratch = {name: carry[name] for name in work.algorithm.scratch}
    descent = Descent(work.optimizer, state)
    hp = replace(work.hp, descent=descent)
    after = work.algorithm.step(carry["w"], grad, work.server, {**work.memory, **scratch}, hp)
    if isinstance(after, tuple):
        after, scratch = after[0], dict(after[1])
    loss, buffers = seen[0]
    new = {"w": after, **scratch, **{STATE + name: v for name, v in descent.state.items()}}
    new |= {BUFFERS: buffers} if BUFFERS in carry else {}
    if active is not None:
        new = {name: v.where(active, carry[name]) for name, v in new.items()}
        loss = loss.where(active[:, 0], 0)
    return {**new, "loss": carry["loss"] + loss}
