"""Where a client does its local work: its samples, a federation of one, its memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedman.config import CUSTOM, Config, resolve
from fedman.data import Dataset, is_npz, load
from fedman.data.images import holds_images
from fedman.errors import UserError
from fedman.execution.device import matmul_precision, one_thread_each, pick_device
from fedman.flower import client_data
from fedman.flower.client_memory import ClientMemory, default_root
from fedman.flower.exchange import exchange
from fedman.flower.messages import LAST, LAYER, Order, Task, decode_task
from fedman.flower.node import Node
from fedman.runs.build import Built, build
from fedman.training.federation import Federation
from fedman.training.local_steps import run_local_steps
from fedman.training.round import Round

SHARED = "FEDMAN_SHARED_DATA"
"""Environment: an npz:PATH of which the clients on this machine take their parts; a simulation sets it."""


def work(order: Order, node: Node, server: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """One client's round: what goes up, and the figures. The memory is on the disk before the reply leaves."""
    worker = _worker(order.settings, order.task, node.data, node.data_dir, node.device)
    federation = worker.federation_of(order)
    algorithm = federation.algorithm
    vectors = _vectors(federation, server)

    root = Path(node.memory_dir).expanduser() if node.memory_dir else default_root()
    memory = ClientMemory(root, order.run, order.client)
    names = (*algorithm.client, *([LAST] if order.keep_last else []))
    kept = memory.load(order.accepted, names, vectors["w"].cpu()) if names and order.accepted >= 0 else {}
    remembered = {
        name: (kept[name].to(federation.device) if kept else torch.zeros_like(vectors["w"]))[None]
        for name in algorithm.client
    }

    with one_thread_each(federation.device), matmul_precision(worker.built.precision):
        round = Round(order.round, [order.client], federation.training.rate(order.round))
        local = federation.work(federation.draw(round, [0]), vectors, remembered)
        w, figures = run_local_steps(local, worker.built.executor)
    leaves, upload = algorithm.finish(w, vectors, local.memory, local.hp)
    if names:
        memory.save(order.round, {name: ({**leaves, LAST: w})[name][0] for name in names})
    sent = {name: upload[name][0] for name in exchange(algorithm).up}
    if LAST in kept:
        sent[LAST] = kept[LAST]
    return (
        {name: v.cpu().numpy() for name, v in sent.items()},
        {name if name == "loss" else LAYER + name: v.double().item() for name, v in figures.items()},
    )


@dataclass(frozen=True)
class Worker:
    """What a process keeps between rounds: the samples of the clients here, and what trains one of them."""

    built: Built
    own: bool  # whether there is one client here, with samples of its own

    def federation_of(self, order: Order) -> Federation:
        """The federation of client k alone: its samples, its draws, its size."""
        (federation,) = self.built.federations
        parts = federation.samples.parts
        if not self.own and order.client >= len(parts):
            raise UserError(f"partition-id: {order.client} is not one of the run's clients, 0 to {len(parts) - 1}")
        part = parts[0 if self.own else order.client]
        return replace(
            federation,
            samples=replace(federation.samples, parts=[part]),
            relative_size=torch.tensor([order.relative_size], dtype=torch.float64),
            ids=[order.client],
            longest=len(part) if federation.longest else None,
        )


@lru_cache(maxsize=1)
def _worker(settings: str, task: str, data: str, data_dir: str, device: str) -> Worker:
    config, wanted = resolve(json.loads(settings)), decode_task(task)
    samples = _own(data, wanted) if data else _public(config, wanted, data_dir)
    parts = [np.arange(len(samples.y_train))] if data else None
    return Worker(build([config], samples, pick_device(device), parts=parts), bool(data))


def _own(path: str, task: Task) -> Dataset:
    x, y = client_data.read(Path(path).expanduser(), task)
    return Dataset(CUSTOM, x, y, x[:0], y[:0], task.classes, task.mean, task.std)


def _public(config: Config, task: Task, data_dir: str) -> Dataset:
    """The run's data set as it lies on this machine; the server cannot name a file here."""
    name = os.environ.get(SHARED, config.dataset)
    if SHARED not in os.environ and (name == CUSTOM or is_npz(name)):
        raise UserError("data: the run has no public data set; start this node with data=PATH, its own samples")
    data = load(name, data_dir or None)
    if (data.shape, data.classes, holds_images(data.x_train)) != (task.shape, task.classes, task.images):
        raise UserError(f"dataset: {name} here has {data.classes} classes of {data.shape}, the run wants {task}")
    return replace(data, mean=task.mean, std=task.std)


def _vectors(federation: Federation, server: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """The server's vectors on the device; refused where they do not fit the algorithm and the model."""
    wanted, size = exchange(federation.algorithm).down, len(federation.initial)
    vectors = {name: torch.from_numpy(v) for name, v in server.items() if v.shape == (size,)}
    fit = len(vectors) == len(server) and all(v.dtype == federation.dtype for v in vectors.values())
    if set(server) != set(wanted) or not fit:
        shown = ", ".join(f"{name} {v.dtype} {v.shape}" for name, v in server.items())
        raise UserError(f"server: has sent {shown[:200]}; wanted are {', '.join(wanted)} {federation.dtype} ({size},)")
    return {name: v.to(federation.device) for name, v in vectors.items()}
