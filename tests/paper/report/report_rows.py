"""Hand-made runs for the tests of the report."""

import json
import math

from fedman.config import resolve
from fedman.paper.presets import PRESETS
from fedman.paper.report.compare import comparisons
from fedman.paper.report.series import series
from fedman.training.evaluate import spread


def row(accuracy, *, dataset="cifar100", rounds_to_target=None, precision="bf16", **keys):
    """A run as `fedman results` writes it, whose curve rises to `accuracy` in the paper's 500 rounds."""
    config = resolve(keys, PRESETS[f"{dataset}-dir0.3" if dataset != "digits" else "digits"]).flat()
    rounds = list(range(5, config["rounds"] + 1, 5))
    if math.isnan(accuracy):
        curve = {"round": [], "all": []}
        return {"config": config, "diverged": "round 3: not finite", "round": 3, "version": "0", "curve": curve}
    return {
        "method": "as named", "config": config, "accuracy": {"all": accuracy, "sel": accuracy, "cloud": accuracy},
        "test_loss": {"all": 2.0}, "rounds_to_target": rounds_to_target, "seconds": 11.0, "device": "test device",
        "precision": precision, "version": "0", "source": {"commit": "c" * 40}, "torch": "0",
        "curve": {"round": rounds, "all": [round(accuracy * t / rounds[-1], 2) for t in rounds]},
    }  # fmt: skip


def pair(plain, man, algorithm="fedavg", **keys):
    """An algorithm with and without MAN at the preset's ζ."""
    return [row(plain, algorithm=algorithm, zeta=0, **keys), row(man, algorithm=algorithm, **keys)]


def compare(rows):
    """The comparison of runs on one data set."""
    (one,) = comparisons(series(rows))
    return one


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def flatness(algorithm="fedavg", zeta=0.0, top=51.0, trace=8700.0, partition="dir0.3", seed=0):
    """What `fedman flatness` writes, with everything the report draws."""
    offsets = [-1.0, 0.0, 1.0]
    return {
        "format": 1,
        "run": {"method": "as named", "dataset": "cifar100", "partition": partition, "clients": 100,
                "model": "cifar_cnn", "algorithm": algorithm, "zeta": zeta, "rounds": 500, "seed": seed},
        "models": {"all": {
            "loss": {"value": 1.0, "gradient_norm": 0.1},
            "top": eigenvalues([top, top / 2, top / 4]),
            "trace": estimate(trace),
            "density": {"starts": 2, "steps": 3, "nodes": [[0.0, 1.0, top], [0.0, 2.0, top]],
                        "weights": [[0.98, 0.015, 0.005]] * 2, "moments": [1.0], "moment_errors": [0.0]},
            "layers": {"blocks": {"fc": {"parameters": 9, "top": 3.0, "residual": 0.0, "trace": estimate(40.0),
                                         "input_norm": 2.0}}},
            "clients": {"top": 4.0, "mean": 8.0, "clients": [6.0, 10.0], "residual": 0.0},
            "landscape": {"seed": 0, "offsets": offsets, "losses": [[a * a + b * b for b in offsets] for a in offsets]},
        }},
    }  # fmt: skip


def eigenvalues(values, **more):
    """The measurement `top`."""
    return {"ends": "top", "tol": 1e-3, "values": values, "residuals": [0.0], "converged": len(values), **more}


def estimate(value, **more):
    """The measurement `trace`."""
    how = {"interval": [0.0, 1.0], "confidence": 0.95, "probes": 9, "converged": True}
    return {"value": value, "error": 1.0, **how, **more}


def own_row(value, *, headline="rmse", lower=True, each=None, more=None, rounds_to_target=None, **keys):
    """A run of another task, whose parts may be a user's own: nothing of it is looked up."""
    config = resolve({"dataset": "digits", "task": "regression", "zeta": 0, "rounds": 10}).flat() | {
        "dataset": "npz:mine.npz", "partition": "iid", **keys,
    }  # fmt: skip
    if math.isnan(value):
        curve = {"round": [], "all": []}
        return {"config": config, "diverged": "round 3: not finite", "round": 3, "version": "0", "curve": curve}
    found = {
        "method": "as named", "config": config, "headline": headline, "lower_is_better": lower,
        headline: {"all": value}, **{name: {"all": v} for name, v in (more or {}).items()},
        "test_loss": {"all": 2.0}, "rounds_to_target": rounds_to_target, "seconds": 1.0, "device": "test device",
        "precision": "fp32", "version": "0", "torch": "0",
        "curve": {"round": [1, 5, 10], "all": [3 * value, 2 * value, value]},
    }  # fmt: skip
    if each is not None:
        found["clients"] = {"each": each, **spread(each, not lower)}
    return found
