"""The app in examples/flower_dropin, run in this process with any strategy."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from tests.flower.local_grid import Alter, LocalGrid

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_dropin"
sys.path.insert(0, str(EXAMPLE))
from digits_app import client_app, task  # noqa: E402

NODES, ROUNDS, LIAR = 3, 2, 102
CONFIG = {"num-server-rounds": ROUNDS, "num-nodes": NODES, "lr": 0.1, "zeta": 0.05}


def unaltered(order: Message, reply: Message) -> Message:
    return reply


def start(
    strategy: Strategy, alter: Alter = unaltered, nodes: tuple[int, ...] = (100, 101, LIAR), zeta: float = 0.05
) -> Result:
    """The example's rounds with a strategy."""
    grid = LocalGrid({n: {"partition-id": n - 100} for n in nodes}, alter, client_app.app, run_config=CONFIG)
    torch.manual_seed(0)
    arrays = ArrayRecord(task.Net().state_dict())
    config = ConfigRecord({"zeta": zeta})
    return strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS, train_config=config, timeout=1)


def fedavg(nodes: int = NODES) -> FedAvg:
    return FedAvg(min_available_nodes=nodes, min_train_nodes=nodes, min_evaluate_nodes=nodes)
