"""FL-Simulator's own `train.py`, with a line for each round.

    python fl_simulator.py CHECKOUT DATA ROUNDS LeNet|ResNet18 FedAvg|FedSMOO

Its clients hold the samples of fedman's partition, written where it keeps its own. Its evaluation on all training
images after every round, which fedman does not have, is left out, and its LeNet gets the name `F` that models.py lacks.
All else is as released.
"""

import os
import runpy
import sys
import time
from pathlib import Path

import numpy as np
from lines import round_line
from workloads import SIMULATOR

import fedman.data
from fedman.data.partition import clients_of

MEAN, STD = np.array([0.491, 0.482, 0.447], "f"), np.array([0.247, 0.243, 0.262], "f")


def prepare(data_dir: Path, folder: Path) -> None:
    """What `DatasetObject` saves once it has split CIFAR-10."""
    if (folder / "test_y.npy").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    data = fedman.data.load("cifar10", str(data_dir))
    parts = clients_of(data, SIMULATOR["partition"], SIMULATOR["clients"], seed=0, sigma=0.0)

    def scaled(images):
        return ((images.astype("f") / 255 - MEAN) / STD).transpose(0, 3, 1, 2)

    np.save(folder / "client_x.npy", np.stack([scaled(data.x_train[part]) for part in parts]))
    np.save(folder / "client_y.npy", np.stack([data.y_train[part].reshape(-1, 1) for part in parts]).astype(np.int64))
    np.save(folder / "test_x.npy", scaled(data.x_test))
    np.save(folder / "test_y.npy", data.y_test.reshape(-1, 1).astype(np.int64))


def main(checkout: Path, data_dir: Path, rounds: int, model: str, method: str) -> None:
    """Play it; a round ends when its learning rate decays."""
    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    import torch.nn.functional
    from server.server import Server

    import models

    models.F = torch.nn.functional

    prepare(data_dir, checkout / "Data/CIFAR10_100_20_Dirichlet_0.600")
    started, validate, decay = time.perf_counter(), Server._validate_, Server._lr_scheduler_

    def validated(self, samples):
        return validate(self, samples) if len(samples[0]) == 10_000 else (0.0, 0.0)

    def told(self):
        nonlocal started
        now, played = time.perf_counter(), int(np.count_nonzero(self.time)) + 1
        round_line(played, now - started, 100 * float(self.test_perf[played - 1][1]))
        started = now
        decay(self)

    def ten(self, t):
        return np.sort(np.random.default_rng(t).choice(self.args.total_client, 10, replace=False))

    Server._validate_, Server._lr_scheduler_, Server._activate_clients_ = validated, told, ten
    options = "--non-iid --dataset CIFAR10 --split-coef 0.6 --active-ratio 0.1 --total-client 100"
    sys.argv = ["train.py", *options.split(), "--model", model, "--method", method, "--comm-rounds", str(rounds)]
    started = time.perf_counter()
    runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), int(sys.argv[3]), *sys.argv[4:])
