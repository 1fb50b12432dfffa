"""The workloads that neighbours publish, as keys of `fedman.run`; and the neighbour's model, from its own code.

`neighbour` and `ours` in compare.py read the same entry, so that both do the same work: the same clients with the same
samples, the same model, the same local steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import nn

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Workload:
    """One neighbour's published experiment, shortened."""

    launcher: str  # the file here that plays it with the neighbour's code
    title: str
    keys: dict[str, Any]  # of fedman.run
    model: Callable[[Path], nn.Module | str]  # from the neighbour's checkout, or a name of ours
    arrays: Callable[[Any], Arrays] | None = None  # from the data set as fedman reads it; None: that itself
    options: tuple[str, ...] = ()  # of the launcher
    rounds: int = 800  # as published


def planar_as_pixels(data: Any) -> Arrays:
    """CIFAR-10 as pfl-research prepares it: the bytes of the three planes read as if they were pixels, normalised."""
    train, test = (_bytes(x).reshape(-1, 32, 32, 3).astype(np.float32) for x in (data.x_train, data.x_test))
    mean, std = train.mean((0, 1, 2), dtype=float), train.std((0, 1, 2), dtype=float)
    one, other = (((x - mean) / std).astype(np.float32) for x in (train, test))
    return one, data.y_train, other, data.y_test


def halves(data: Any) -> Arrays:
    """CIFAR-10 as Flower's quickstart prepares it: (x − 0.5) / 0.5, channels first."""
    one, other = (
        (_bytes(x).reshape(-1, 3, 32, 32).astype(np.float32) / 255 - 0.5) / 0.5 for x in (data.x_train, data.x_test)
    )
    return one, data.y_train, other, data.y_test


def _bytes(images: np.ndarray) -> np.ndarray:
    """uint8 images, channels last, as CIFAR's files hold them: plane after plane."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def _imported(folder: Path, module: str, name: str, *arguments: Any) -> nn.Module:
    sys.path.insert(0, str(folder))
    made: nn.Module = getattr(import_module(module), name)(*arguments)
    return made


def pfl_cnn(checkout: Path) -> nn.Module:
    sys.path.insert(0, str(checkout))
    return _imported(checkout / "benchmarks", "model.pytorch.cnn", "simple_cnn", (32, 32, 3), 10)


def quickstart_net(checkout: Path) -> nn.Module:
    import flower_quickstart

    flower_quickstart.stand_in()
    return _imported(checkout / "examples/quickstart-pytorch", "pytorchexample.task", "Net")


def flute_resnet(checkout: Path) -> nn.Module:
    """Its ResNet-18 with GroupNorm of 32 groups, torch's. As released it is built with batch statistics and 1,000
    outputs (`resnet18()` without arguments), although its table says GroupNorm."""
    names = ("print_rank", "print_cuda_stats", "to_device")
    sys.modules["utils"] = ModuleType("utils")  # FLUTE's own needs packages that the model does not
    vars(sys.modules["utils"]).update(dict.fromkeys(names))
    sys.path.insert(0, str(checkout))
    model = import_module("experiments.cv_resnet_fedcifar100.model")
    model.norm2d = lambda planes, *_: nn.GroupNorm(32, planes)
    made: nn.Module = model.resnet18(num_classes=100)
    return made


def simulator_resnet(checkout: Path) -> nn.Module:
    return _imported(checkout, "models", "client_model", "ResNet18", 10)


PLAIN = {"lr_schedule": "constant", "weight_decay": 0.0, "clip": float("inf"), "augment": False}
SIMULATOR = {
    "dataset": "cifar10", "partition": "dir0.6", "clients": 100, "participation": 0.1, "cohort": "fixed", "epochs": 5,
    "batch_size": 50, "lr": 0.1, "lr_decay": 0.998, "weight_decay": 0.001, "clip": 10.0, "augment": True,
    "eval_others_every": 1,
}  # fmt: skip
SMOO = {"algorithm": "fedsmoo", "alpha": 0.1, "rho": 0.1}
FLUTE = {
    **PLAIN, "dataset": "cifar100", "partition": "iid", "clients": 500, "participation": 0.02, "cohort": "fixed",
    "epochs": 1, "batch_size": 20, "lr": 0.1, "eval_others_every": 50,
}  # fmt: skip
GROUP_NORM = "ResNet-18 with GroupNorm, torchvision's stem"

WORKLOADS = {
    "pfl": Workload(
        "pfl_research.py",
        "pfl-research, CIFAR-10 iid: 50 of 1,000 clients, 1 epoch of batch 10",
        {**PLAIN, "partition": "iid", "clients": 1000, "participation": 0.05, "cohort": "fixed", "epochs": 1,
         "batch_size": 10, "lr": 0.1, "eval_others_every": 10},
        pfl_cnn,
        planar_as_pixels,
        rounds=1500,
    ),
    "flower": Workload(
        "flower_quickstart.py",
        "Flower, quickstart-pytorch: 10 of 10 clients, 1 epoch of batch 32, momentum 0.9",
        {**PLAIN, "partition": "iid", "clients": 10, "participation": 1.0, "cohort": "fixed", "epochs": 1,
         "batch_size": 32, "lr": 0.1, "momentum": 0.9, "eval_others_every": 1},
        quickstart_net,
        halves,
    ),
    "lenet": Workload("fl_simulator.py", "FL-Simulator, CIFAR-10, LeNet, FedAvg: 10 % of 100, 5 epochs of batch 50",
                      SIMULATOR, lambda checkout: "cifar_cnn", options=("LeNet", "FedAvg")),
    "lenet-smoo": Workload("fl_simulator.py", "the same, FedSMOO",
                           SIMULATOR | SMOO, lambda checkout: "cifar_cnn", options=("LeNet", "FedSMOO")),
    "resnet": Workload("fl_simulator.py", f"FL-Simulator, CIFAR-10, {GROUP_NORM}, FedAvg",
                       SIMULATOR, simulator_resnet,
                       options=("ResNet18", "FedAvg")),
    "resnet-smoo": Workload("fl_simulator.py", "the same, FedSMOO",
                            SIMULATOR | SMOO,
                            simulator_resnet,
                            options=("ResNet18", "FedSMOO")),
    "flute-10": Workload("flute_loop.py", "FLUTE, the same model on the images of CIFAR-10, as many and as large",
                         FLUTE | {"dataset": "cifar10"}, flute_resnet, options=("cifar10",), rounds=4000),
    "flute": Workload(
        "flute_loop.py",
        "FLUTE, FED_CIFAR100's model: 10 of 500 clients, 1 epoch of batch 20",
        FLUTE,
        flute_resnet,
        rounds=4000,
    ),
}  # fmt: skip
