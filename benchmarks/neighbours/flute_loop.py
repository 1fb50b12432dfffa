"""FLUTE's FED_CIFAR100 model, `experiments/cv_resnet_fedcifar100/model.py`, in a plain loop; a line for each round.

    python flute_loop.py CHECKOUT DATA ROUNDS [cifar10]

With the images of CIFAR-10, as many and as large, it takes as long.

FLUTE itself is pinned to torch 1.11 and downloads its data, so this is its model, its local work and its mean of the
clients, without its processes and messages: less than FLUTE does.
"""

import copy
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from lines import round_line
from workloads import WORKLOADS

import fedman.data


def main(checkout: Path, data_dir: Path, rounds: int, dataset: str = "cifar100") -> None:
    """One client after the other, their mean, the test set every 50 rounds and at the end."""
    workload = WORKLOADS["flute"]
    keys, device = workload.keys, "cuda" if torch.cuda.is_available() else "cpu"
    data = fedman.data.load(dataset, str(data_dir))
    x, test = (torch.tensor(v.transpose(0, 3, 1, 2)).float().div(255).to(device) for v in (data.x_train, data.x_test))
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    x, test = (x - mean) / std, (test - mean) / std
    y, truth = (torch.tensor(v).long().to(device) for v in (data.y_train, data.y_test))
    rng, model = np.random.default_rng(0), workload.model(checkout).to(device)
    parts = rng.permutation(len(x)).reshape(keys["clients"], -1)
    for t in range(1, rounds + 1):
        started, total = time.perf_counter(), None
        for client in rng.choice(keys["clients"], 10, replace=False):
            local = copy.deepcopy(model).train()
            optimiser = torch.optim.SGD(local.parameters(), keys["lr"])
            for batch in np.split(rng.permutation(parts[client]), range(20, len(parts[client]), 20)):
                loss = F.cross_entropy(local(x[batch]), y[batch])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            state = local.state_dict()
            total = {name: v + (total[name] if total else 0) for name, v in state.items()}
        model.load_state_dict({name: v / 10 for name, v in total.items()})
        accuracy = None
        if t % keys["eval_others_every"] == 0 or t == rounds:
            model.eval()
            with torch.no_grad():
                right = sum(
                    (model(a).argmax(1) == b).sum().item()
                    for a, b in zip(test.split(500), truth.split(500), strict=True)
                )
            accuracy = right / len(test) * 100
        if device == "cuda":
            torch.cuda.synchronize()
        round_line(t, time.perf_counter() - started, accuracy)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), int(sys.argv[3]), *sys.argv[4:])
