"""pfl-research's own benchmark, `benchmarks/image_classification/pytorch/train.py`, with a line for each round.

    python pfl_research.py CHECKOUT DATA ROUNDS

All is as released. Its preparation is done here from the same bytes, to the same files.
"""

import os
import pickle
import runpy
import sys
import time
from pathlib import Path

import numpy as np
from lines import round_line

import fedman.data


def prepare(data_dir: Path, folder: Path) -> None:
    """`cifar10_train.p` and `cifar10_test.p`, as `dataset/cifar10/download_preprocess.py` writes them."""
    if (folder / "cifar10_test.p").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    data = fedman.data.load("cifar10", str(data_dir))
    for name, x, y in (("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        images = np.ascontiguousarray(x.transpose(0, 3, 1, 2)).reshape(-1, 32, 32, 3)
        (folder / f"cifar10_{name}.p").write_bytes(pickle.dumps((images, np.asarray(y).reshape(-1, 1))))


def main(checkout: Path, data_dir: Path, rounds: int) -> None:
    """Play the benchmark; its stopwatch tells when a round ends."""
    prepare(data_dir, checkout / "benchmarks/data/cifar10")
    os.chdir(checkout / "benchmarks")
    sys.path[:0] = [str(checkout), str(checkout / "benchmarks")]
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.callback.stopwatch import StopwatchCallback

    started, accuracy, ended = time.perf_counter(), None, None
    released, evaluate = StopwatchCallback.after_central_iteration, CentralEvaluationCallback._eval

    def evaluated(self, model):
        nonlocal accuracy
        metrics = evaluate(self, model)
        found = {str(name): value for name, value in metrics[1].to_simple_dict().items()}
        accuracy = 100 * next(value for name, value in found.items() if "accuracy" in name)
        return metrics

    def told(self, aggregate_metrics, model, *, central_iteration):
        nonlocal started, ended
        now = time.perf_counter()
        if ended:
            round_line(*ended, accuracy)  # the round before, which is evaluated after the stopwatch
        started, ended = now, (central_iteration + 1, now - started)
        return released(self, aggregate_metrics, model, central_iteration=central_iteration)

    StopwatchCallback.after_central_iteration, CentralEvaluationCallback._eval = told, evaluated
    sys.argv = ["train.py", "--args_config", "image_classification/configs/baseline.yaml", "--central_num_iterations",
                str(rounds)]  # fmt: skip
    runpy.run_path("image_classification/pytorch/train.py", run_name="__main__")
    round_line(*ended, accuracy)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), int(sys.argv[3]))
