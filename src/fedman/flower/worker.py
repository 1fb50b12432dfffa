"""Where a client does its local work: its samples, an engine for a chunk of one, its memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedman.config import CUSTOM, Config, resolve
from fedman.data import Dataset, is_npz, load
from fedman.data.images import holds_images
from fedman.errors import UserError
from fedman.execution.device import matmul_precision, one_thread_each, pick_device
from fedman.flower import client_data as own
from fedman.flower.client_memory import ClientMemory, default_root
from fedman.flower.exchange import exchange
from fedman.flower.messages import LAST, LAYER, Order, Task, decode_task
from fedman.runs.build import make_engine, on_device
from fedman.training.engine import Engine
from fedman.training.local_steps import train
from fedman.training.state import Federation

if TYPE_CHECKING:
    from fedman.flower.client import Node

SHARED = "FEDMAN_SHARED_DATA"
"""Environment: an npz:PATH of which the clients on this machine take their parts; a simulation sets it."""


def work(order: Order, node: Node, server: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """One client's round: what goes up, and the figures. The memory is on the disk before the reply leaves."""
    desk = _desk(order.settings, order.task, node.data, node.data_dir, node.device)
    engine, algorithm = desk.engine, desk.engine.algorithm
    desk.seat(order)
    state = _state(engine, order, server)

    root = Path(node.memory_dir).expanduser() if node.memory_dir else default_root()
    memory = ClientMemory(root, order.run, order.client)
    names = (*algorithm.client, *([LAST] if order.keep_last else []))
    kept = memory.load(order.accepted, names, state.sel.cpu()) if names and order.accepted >= 0 else {}
    for name in algorithm.client:
        state.memory[name] = (kept[name].to(engine.device) if kept else torch.zeros_like(state.sel))[None]

    with one_thread_each(engine.device), matmul_precision(engine.precision):
        job = engine.job(state, [0])
        w, figures = train(job, engine.stacked, engine.graphs, engine.stopping)
    leaves, upload = algorithm.finish(w, state.server, job.memory, job.hp)
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
class Desk:
    """What a process keeps between rounds: the samples of the clients here, and an engine for one of them."""

    engine: Engine
    parts: list[Tensor]  # of all clients, or of the one with samples of its own
    own: bool

    def seat(self, order: Order) -> None:
        """Make it client k's: its samples, its draws, its size."""
        if not self.own and order.client >= len(self.parts):
            raise UserError(f"partition-id: {order.client} is not one of the run's clients, 0 to {len(self.parts) - 1}")
        engine, part = self.engine, self.parts[0 if self.own else order.client]
        engine.samples = replace(engine.samples, parts=[part])
        engine.longest = len(part) if engine.graphs else None
        engine.ids, engine.relative_size = [order.client], torch.tensor([order.relative_size], dtype=torch.float64)


@lru_cache(maxsize=1)
def _desk(settings: str, task: str, data: str, data_dir: str, device: str) -> Desk:
    config, wanted = resolve(json.loads(settings)), decode_task(task)
    device = pick_device(device)
    samples = _own(data, wanted) if data else _public(config, wanted, data_dir)
    parts = [np.arange(len(samples.y_train))] if data else None
    engine = make_engine(config, samples, on_device(samples, device), None, device, parts)
    return Desk(engine, engine.samples.parts, bool(data))


def _own(path: str, task: Task) -> Dataset:
    x, y = own.read(Path(path).expanduser(), task)
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


def _state(engine: Engine, order: Order, server: Mapping[str, np.ndarray]) -> Federation:
    """The order as a federation of one client; refused where the server's vectors do not fit the model."""
    wanted, size = exchange(engine.algorithm).down, engine.stacked.size
    vectors = {name: torch.from_numpy(v) for name, v in server.items() if v.shape == (size,)}
    if (
        set(server) != set(wanted)
        or any(v.dtype != engine.dtype for v in vectors.values())
        or len(vectors) < len(server)
    ):
        shown = ", ".join(f"{name} {v.dtype} {v.shape}" for name, v in server.items())
        raise UserError(f"server: has sent {shown[:200]}; wanted are {', '.join(wanted)} {engine.dtype} ({size},)")
    vectors = {name: v.to(engine.device) for name, v in vectors.items()}
    w = vectors["w"]
    return Federation(order.round, dict(vectors), {}, w[None], w.double(), w)
