"""FedAvgM, which is FedAvg with momentum at the server, beside FedAvg.

Hsu et al., 'Measuring the Effects of Non-Identical Data Distribution', 2019.
"""

from dataclasses import dataclass

import fedman


@dataclass(frozen=True)
class FedAvgM(fedman.Algorithm):
    """Step as FedAvg. Server: m ← βm + (Σ n_k x_k / Σ n_k − θ), θ ← θ + m."""

    title = "FedAvgM"
    server = ("w", "m")
    weighted = True

    beta: float = fedman.hyperparameter(0.9, "β, momentum of the server", maximum=1.0)

    def step(self, w, grad, server, client, hp):
        return fedman.descend(w, grad(w), hp)

    def update(self, server, mean, fraction):
        m = self.beta * server["m"] + mean["w"] - server["w"]
        return {"w": server["w"] + m, "m": m}


if __name__ == "__main__":
    for algorithm in (fedman.FedAvg(), FedAvgM(beta=0.5)):
        result = fedman.run(algorithm=algorithm, clients=20, participation=0.2, rounds=15, epochs=2, lr=0.05)
        print(f"{algorithm}: the server's model has an accuracy of {result.summary['accuracy']['cloud']:.1f} %")
