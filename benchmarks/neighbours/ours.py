"""A workload played by fedman, with a line for each round.

python ours.py WORKLOAD CHECKOUT DATA ROUNDS [KEY=VALUE ...]
"""

import sys
from pathlib import Path

from lines import round_line
from workloads import WORKLOADS

import fedman


def main(name: str, checkout: Path, data_dir: Path, rounds: int, *more: str) -> None:
    """The first rounds of a run of the published length, for which fedman chooses how to compute it.

    `cloud` is the model that the neighbours evaluate; `all`, fedman's own, is evaluated at the end alone.
    """
    workload = WORKLOADS[name]
    keys = {"dataset": "cifar10", "algorithm": "fedavg", "rounds": workload.rounds, "eval_every": rounds}
    keys |= workload.keys
    keys["eval_others_every"] = min(keys["eval_others_every"], rounds)
    keys |= dict(word.split("=") for word in more)
    dataset = keys.pop("dataset")
    model = workload.model(checkout)
    data: object = dataset
    if workload.arrays:
        data = workload.arrays(fedman.data.load(dataset, str(data_dir)))

    def tell(record: dict) -> None:
        round_line(record["round"], record["seconds"], record["accuracy"].get("cloud"))
        if record["round"] == rounds:
            raise fedman.StopRun("the rounds to compare are played")

    fedman.run(dataset=data, data_dir=data_dir, model=model, progress=tell, **keys)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]).resolve(), int(sys.argv[4]), *sys.argv[5:])
