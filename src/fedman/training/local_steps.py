"""The local work of a chunk of clients: K steps on `[S, P]`, in a loop or as replays of a captured graph.

A chunk can hold clients of several runs: their jobs are stacked row on row (`stack`), since nothing in a step connects
one row with another.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedman.algorithms import Algorithm, Local, State
from fedman.execution.cuda_graphs import Graphs, Inputs, Task, Tensors
from fedman.execution.stacked import Stacked
from fedman.training.batches import Batch, Batches


class Stopped(Exception):
    """The user asked to stop; the state is that of the last finished round."""


@dataclass(frozen=True)
class Job:
    """Everything the steps of S clients need."""

    batches: Batches
    server: State  # [P] each; [S, P] where runs are stacked
    memory: State  # [S, P] each: the clients' own, and what the algorithm's `begin` made
    hp: Local
    algorithm: Algorithm  # a hyper-parameter in which stacked runs differ is a column [S, 1]
    zeta: float | Tensor  # ζ; [S] where runs are stacked

    def __len__(self) -> int:
        return len(self.hp.p)

    def first(self, times: int) -> Job:
        """The work of the first client, so many times."""

        def rows(v: Tensor) -> Tensor:
            return v[:1].expand(times, *v.shape[1:])

        hp = replace(self.hp, p=rows(self.hp.p), steps=rows(self.hp.steps))
        memory = {name: rows(v) for name, v in self.memory.items()}
        return replace(self, batches=self.batches.first(times), memory=memory, hp=hp)


def stack(jobs: Sequence[Job]) -> Job:
    """The rows of several runs as one job: the same algorithm, model and training, but for numbers of the algorithm's
    step, ζ, seed and partition."""
    if len(jobs) == 1:
        return jobs[0]
    first = jobs[0]

    def rows(values: Sequence[float]) -> Tensor:
        return torch.cat([first.hp.lr.new_full((len(j),), v) for j, v in zip(jobs, values, strict=True)])

    given = {name: [getattr(j.algorithm, name) for j in jobs] for name in vars(first.algorithm)}
    own = {name: rows(values)[:, None] for name, values in given.items() if len(set(values)) > 1}
    hp = replace(first.hp, p=torch.cat([j.hp.p for j in jobs]), steps=torch.cat([j.hp.steps for j in jobs]))
    return Job(
        Batches.stacked([j.batches for j in jobs]),
        {name: torch.cat([j.server[name].expand(len(j), -1) for j in jobs]) for name in first.server},
        {name: torch.cat([j.memory[name] for j in jobs]) for name in first.memory},
        hp,
        replace(first.algorithm, **own),
        rows([float(j.zeta) for j in jobs]),
    )


def train(
    job: Job, stacked: Stacked, graphs: Graphs | None, stopping: threading.Event
) -> tuple[Tensor, dict[str, Tensor]]:
    """The final models `[S, P]`, and by client `[S]`: the mean "loss" over its steps and each layer's MAN term.

    The MAN terms are those of the final model on the client's first batch, whether ζ is zero or not.
    """
    task = _task(job, stacked)
    if graphs is not None and not stopping.is_set():
        carry = graphs.run(task)
    else:
        carry = dict(task.carry)
        for j in range(task.steps):
            if stopping.is_set():
                raise Stopped
            carry = dict(task.step(task.inputs, j, carry))
    figures = {"loss": carry["loss"] / job.hp.steps[:, 0]}
    return carry["w"], figures | stacked.man_terms(carry["w"], *job.batches.at(0))


def rehearse(job: Job, stacked: Stacked, graphs: Graphs) -> None:
    """Capture the graph of a job without taking a step."""
    graphs.capture(_task(job, stacked))


def _task(job: Job, stacked: Stacked) -> Task:
    """The steps of a job as a function of tensors."""
    w = job.server["w"].expand(len(job), -1)
    carry = {"w": w, "loss": w.new_zeros(len(job))}
    carry |= {name: w.new_zeros(()).expand_as(w) for name in job.algorithm.scratch}
    numbers = {"zeta": job.zeta, **vars(job.algorithm)}
    own = {name: v for name, v in numbers.items() if isinstance(v, Tensor)}
    inputs = {
        "batches": job.batches.tensors,
        "server": job.server,
        "memory": job.memory,
        "hp": {"lr": job.hp.lr, "p": job.hp.p, "steps": job.hp.steps},
        "own": own,
    }

    def step(inputs: Inputs, j: int | Tensor, carry: Tensors) -> Tensors:
        batches, hp = job.batches.over(inputs["batches"]), replace(job.hp, **inputs["hp"])  # type: ignore[arg-type]
        own = dict(inputs["own"])
        zeta = own.pop("zeta", job.zeta)
        now = Job(batches, inputs["server"], inputs["memory"], hp, replace(job.algorithm, **own), zeta)
        return _step(now, stacked, batches.at(j), batches.active(j), carry)

    fixed = tuple((name, v) for name, v in numbers.items() if name not in own)
    return Task(step, inputs, carry, job.batches.steps, fixed)


def _step(job: Job, stacked: Stacked, batch: Batch, active: Tensor | None, carry: Tensors) -> Tensors:
    """One local step; clients that are not `active` any more stay where they are."""
    seen: list[Tensor] = []
    x, y, weight = batch
    x = stacked.images(x)

    def grad(w: Tensor) -> Tensor:
        gradient, ce = stacked.gradient(w, x, y, weight, job.zeta)
        seen.append(ce)
        return gradient

    scratch = {name: carry[name] for name in job.algorithm.scratch}
    after = job.algorithm.step(carry["w"], grad, job.server, {**job.memory, **scratch}, job.hp)
    if isinstance(after, tuple):
        after, scratch = after[0], dict(after[1])
    w, loss = after, seen[0]
    if active is not None:
        w, loss = w.where(active, carry["w"]), loss.where(active[:, 0], 0)
    return {"w": w, "loss": carry["loss"] + loss, **scratch}
