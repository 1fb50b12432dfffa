"""Flower's `examples/quickstart-pytorch` on its simulation engine, with a line for each round.

    python flower_quickstart.py CHECKOUT DATA ROUNDS

Model, training, evaluation, client, server and strategy are the example's. Its data come from the Hugging Face hub,
which needs a network: here the same images stand in for `flwr_datasets` and `datasets`, as arrays, which spares Flower
the decoding of PNG files. Clients do not evaluate (`fraction-evaluate = 0`), as in fedman; the server evaluates the
global model on the test set after every round.
"""

import os
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
from lines import round_line

CLIENTS = 10


class Images:
    """As much of a `datasets.Dataset` as the example uses."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict[str, object]:
        return {"img": self.images[i], "label": int(self.labels[i])}

    def train_test_split(self, test_size: float, seed: int) -> "Parts":
        """All samples are for training, as in fedman."""
        return Parts(train=self, test=Images(self.images[:1], self.labels[:1]))

    def with_transform(self, transform: object) -> "Images":
        return self  # scaled already

    with_format = with_transform


class Parts(dict[str, Images]):
    """As much of a `datasets.DatasetDict`."""

    def with_transform(self, transform: object) -> "Parts":
        return self


def stand_in() -> None:
    """Modules in the place of `datasets`, `flwr_datasets` and, where it does not import, torchvision's transforms."""
    folder = os.environ.get("NEIGHBOUR_ARRAYS", "")

    def load(split: str) -> tuple[np.ndarray, np.ndarray]:
        return tuple(np.load(Path(folder) / f"{name}_{split}.npy", mmap_mode="r") for name in "xy")

    class Federated:
        def __init__(self, dataset: str, partitioners: object) -> None:
            self.x, self.y = load("train")

        def load_partition(self, number: int) -> Images:
            size = len(self.x) // CLIENTS
            return Images(self.x[number * size : (number + 1) * size], self.y[number * size : (number + 1) * size])

    for name, contents in {
        "datasets": {"load_dataset": lambda name, split: Images(*load(split))},
        "flwr_datasets": {"FederatedDataset": Federated},
        "flwr_datasets.partitioner": {"IidPartitioner": lambda num_partitions: None},
        "torchvision": {},
        "torchvision.transforms": dict.fromkeys(("Compose", "Normalize", "ToTensor"), lambda *_: None),
    }.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)


def prepare(data_dir: Path, folder: Path) -> None:
    from workloads import halves

    import fedman.data

    if (folder / "y_test.npy").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    x_train, y_train, x_test, y_test = halves(fedman.data.load("cifar10", str(data_dir)))
    order = np.random.default_rng(0).permutation(len(x_train))
    for name, array in (
        ("x_train", x_train[order]),
        ("y_train", y_train[order]),
        ("x_test", x_test),
        ("y_test", y_test),
    ):
        np.save(folder / f"{name}.npy", array)


def main(checkout: Path, data_dir: Path, rounds: int) -> None:
    """Play it; the server's evaluation of the global model ends a round, that before the first one starts the clock."""
    example, here = checkout / "examples/quickstart-pytorch", Path(__file__).parent
    prepare(data_dir, example / "arrays")
    path = f"{here}:{example}:{os.environ.get('PYTHONPATH', '')}"  # for the simulation's workers
    os.environ |= {"NEIGHBOUR_ARRAYS": str(example / "arrays"), "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    stand_in()
    sys.path.insert(0, str(example))
    import quickstart_client
    import torch
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation
    from pytorchexample import server_app

    started, evaluate, before = time.perf_counter(), server_app.global_evaluate, None

    def told(server_round, arrays):
        nonlocal started, before
        weights = torch.cat([v.flatten() for v in arrays.to_torch_state_dict().values()])
        if before is not None and torch.equal(weights, before):
            raise RuntimeError("no client trained in this round")  # Flower goes on without those that failed
        before = weights
        metrics = evaluate(server_round, arrays)
        now = time.perf_counter()
        if server_round:
            round_line(server_round, now - started, 100 * metrics["accuracy"])
        started = now
        return metrics

    server_app.global_evaluate = told
    app = ServerApp()

    @app.main()
    def play(grid: Grid, context: Context) -> None:
        context.run_config |= {"fraction-evaluate": 0.0, "num-server-rounds": rounds, "learning-rate": 0.1}
        os.chdir(example)
        server_app.app(grid, context)

    share = {"client_resources": {"num_cpus": 1, "num_gpus": 0.1 if torch.cuda.is_available() else 0.0}}
    run_simulation(app, quickstart_client.app, CLIENTS, backend_config=share)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), int(sys.argv[3]))
