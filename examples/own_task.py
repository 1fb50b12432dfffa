"""Regression with a loss of its own: Huber's, which outliers cannot pull about as they do the squared error."""

from dataclasses import dataclass

import numpy as np
from torch import nn

import fedman


@dataclass(frozen=True)
class Huber(fedman.Task):
    """Loss: r²/2 where |r| ≤ δ, δ(|r| − δ/2) elsewhere, for the residual r = output − target. Score: |r|."""

    title = "robust regression"
    headline = "mae"
    higher_is_better = False

    delta: float = fedman.hyperparameter(1.0, "δ, where the loss turns from square to straight", minimum=1e-6)

    def loss(self, output, target):
        return nn.functional.huber_loss(output, target, reduction="none", delta=self.delta).mean(1)

    def scores(self, output, target):
        return {"mae": (output - target).abs().mean(1)}

    def outputs(self, data):
        return data.y_train.shape[1]


def noisy(samples, outliers, seed):
    """y = sin(3x₁) + x₂ with a little noise, and some values that are far off."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (samples, 2)).astype(np.float32)
    y = np.sin(3 * x[:, :1]) + x[:, 1:] + 0.05 * rng.normal(size=(samples, 1))
    y[rng.random(samples) < outliers] += 20
    return x, y.astype(np.float32)


if __name__ == "__main__":
    data = (*noisy(1000, 0.1, seed=0), *noisy(200, 0.0, seed=1))  # x_train, y_train, x_test, y_test
    for task in (fedman.Regression(), Huber(delta=0.1)):
        result = fedman.run(
            dataset=data, task=task, partition="iid", clients=10, participation=1.0, rounds=30, epochs=2
        )
        print(f"{task}: mean absolute error {result.summary['mae']['all']:.3f} without outliers")
