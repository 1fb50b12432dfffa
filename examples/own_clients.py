"""Clients as they are: each has training and test samples of its own, and figures of its own in the result.

Then the same samples under another partition, given as index arrays.
"""

import numpy as np

import fedman


def writers():
    """Eight clients who hold the embedded digits: client k has mostly the digits k and k + 1."""
    digits, rng = fedman.data.load("digits"), np.random.default_rng(0)
    held = {}
    for k in range(8):
        mine = np.isin(digits.y_train, (k, k + 1)) & (rng.random(len(digits.y_train)) < 0.5)
        mine |= rng.random(len(digits.y_train)) < 0.02
        x, y = digits.x_train[mine], digits.y_train[mine]
        cut = len(y) * 4 // 5
        held[f"writer {k}"] = (x[:cut], y[:cut], x[cut:], y[cut:])
    return held


if __name__ == "__main__":
    data = fedman.data.from_clients(writers())
    settings = {"participation": 0.5, "rounds": 20, "epochs": 2, "lr": 0.05}

    result = fedman.run(dataset=data, **settings)
    figures = result.summary["clients"]
    print(result)
    for name, accuracy in zip(data.client_names, figures["each"], strict=True):
        print(f"  {name}: {accuracy:.1f} % of its own test samples")
    print(f"mean {figures['mean']:.1f} %, worst tenth {figures['worst_tenth']:.1f} %, spread {figures['spread']:.1f}")

    turns = np.arange(len(data.y_train)) % 8  # sample i belongs to client i mod 8
    parts = [np.flatnonzero(turns == k) for k in range(8)]
    mixed = fedman.run(dataset=data, partition=parts, **settings)
    print(f"the same samples dealt out in turns: accuracy {mixed.accuracy:.1f} %, not {result.accuracy:.1f} %")
