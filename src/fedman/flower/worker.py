"""Where a client does its local work: its samples, a federation of one, its memory."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import RecordDict

from fedman.config import CUSTOM, Config, resolve
from fedman.data import Dataset, is_path, load
from fedman.data.images import holds_images
from fedman.errors import UserError
from fedman.execution.device import determinism, matmul_precision, one_thread_each, pick_device
from fedman.flower import client_data
from fedman.flower.client_memory import ClientMemory
from fedman.flower.exchange import exchange
from fedman.flower.imports import check_imports
from fedman.flower.messages import SERVER, TERM, Order, SampleKind
from fedman.flower.node import Node
from fedman.flower.screen import read_arrays
from fedman.runs.build import Built, build
from fedman.training.federation import Federation
from fedman.training.local_steps import run_local_steps
from fedman.training.round import Round
from fedman.training.settings import BUFFERS

SHARED = "FEDMAN_SHARED_DATA"
"""Environment: an npz:PATH of which the clients on this machine take their parts; a simulation sets it."""


def work(order: Order, node: Node, content: RecordDict) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """One client's round: what goes up, and the figures. The memory is on the disk before the reply leaves."""
    check_imports(json.loads(order.settings), node.allow)
    built = _build(order.settings, order.samples, node.data, node.data_dir, node.device)
    federation = _federation(built, order, own=bool(node.data))
    w, buffers = federation.initial, federation.initial_buffers
    travels = exchange(federation.algorithm, buffers is not None, federation.own is not None)
    starts = dict.fromkeys(travels.down, w) | ({} if buffers is None else {BUFFERS: buffers})
    dtype = str(w.dtype).removeprefix("torch.")
    arrays = read_arrays(content, SERVER, {name: (tuple(v.shape), dtype) for name, v in starts.items()})
    vectors = {  # copied: numpy aligns memory as it comes, and a matrix product's last bit can depend on that
        name: torch.from_numpy(v).to(w.device, copy=True) for name, v in arrays.items()
    }

    root = node.memory_dir or os.environ.get("FEDMAN_MEMORY") or "~/.local/state/fedman/memory"
    memory = ClientMemory(Path(root).expanduser(), order.run, order.client)
    kept = memory.load(order.accepted, federation.memory) if federation.memory and order.accepted >= 0 else {}
    remembered = {name: kept.get(name, start).to(w.device)[None] for name, start in federation.memory.items()}

    with one_thread_each(w.device), matmul_precision(built.precision), determinism(True, w.device.type):
        round = Round(order.round, [order.client], federation.training.rate(order.round))
        local = federation.work(federation.draw(round, [0]), vectors, remembered)
        result = run_local_steps(local, built.executor)
    leaves, upload = federation.finish(local, result)
    if federation.memory:
        memory.save(order.round, {name: leaves[name][0] for name in federation.memory}, order.accepted)
    return (
        {name: upload[name][0].cpu().numpy() for name in travels.up},
        {name if name == "loss" else TERM + name: v.double().item() for name, v in result.figures.items()},
    )


def _federation(built: Built, order: Order, own: bool) -> Federation:
    """The federation of client k alone: its samples, its draws, its size."""
    (federation,) = built.federations
    parts = federation.samples.parts
    if not own and order.client >= len(parts):
        raise UserError(f"partition-id: {order.client} is not one of the run's clients, 0 to {len(parts) - 1}")
    if not own and federation.relative_size[order.client].item() != order.relative_size:
        raise UserError(
            f"partition: client {order.client} has {len(parts[order.client])} samples here, the server knows another "
            "number; it and this node need the same data set and the same versions of fedman and numpy"
        )
    part = parts[0 if own else order.client]
    return replace(
        federation,
        samples=replace(federation.samples, parts=[part]),
        relative_size=torch.tensor([order.relative_size], dtype=torch.float64),
        ids=[order.client],
        longest=len(part) if federation.longest else None,
    )


@lru_cache(maxsize=1)
def _build(settings: str, samples: str, data: str, data_dir: str, device: str) -> Built:
    """What a process keeps between rounds: the samples of the clients here, and what trains one of them."""
    given, wanted = json.loads(settings), SampleKind(**json.loads(samples))
    if SHARED not in os.environ and is_path(str(given.get("dataset"))):  # settings of a path are resolved by reading it
        raise UserError("data: the server names a file of this machine, which is not read")
    config = resolve(given)
    found = _own(data, wanted) if data else _public(config, wanted, data_dir)
    parts = [np.arange(len(found.y_train))] if data else None
    return build([config], found, pick_device(device), parts=parts)


def _own(path: str, wanted: SampleKind) -> Dataset:
    x, y = client_data.read(Path(path).expanduser(), wanted)
    return Dataset(CUSTOM, x, y, x[:0], y[:0], wanted.classes, wanted.mean, wanted.std)


def _public(config: Config, wanted: SampleKind, data_dir: str) -> Dataset:
    """The run's data set as it lies on this machine."""
    name = os.environ.get(SHARED, config.dataset)
    if name == CUSTOM:
        raise UserError("data: the run has no public data set; start this node with data=PATH, its own samples")
    data = load(name, data_dir or None)
    if (data.shape, data.classes, holds_images(data.x_train)) != (wanted.shape, wanted.classes, wanted.images):
        raise UserError(f"dataset: {name} here has {data.classes} classes of {data.shape}, the run wants {wanted}")
    return replace(data, mean=wanted.mean, std=wanted.std)
