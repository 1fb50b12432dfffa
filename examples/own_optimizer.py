"""A local optimiser of its own: signSGD. Bernstein et al., 'Compressed Optimisation for Non-Convex Problems', 2018."""

from dataclasses import dataclass

import fedman


@dataclass(frozen=True)
class SignSGD(fedman.LocalOptimizer):
    """m ← μm + (1 − μ)g; w ← w − η(sign(m) + λw)."""

    title = "signSGD"

    memory: float = fedman.hyperparameter(0.9, "μ, memory of the gradient", maximum=0.9999)

    def init(self, w):
        return {"m": w.new_zeros(w.shape)}

    def update(self, w, g, state, hp, extra_decay=0.0):
        m = self.memory * state["m"] + (1 - self.memory) * g
        return w - hp.lr * (m.sign() + (hp.decay + extra_decay) * w), {"m": m}

    def reach(self, norm, steps, size, lr, clip, decay):
        """A step is at most η(√P + λ‖w‖) long."""
        far = 0.0
        for _ in range(steps):
            far += lr * (size**0.5 + decay * (norm + far))
        return far


if __name__ == "__main__":
    for optimizer, lr in ((fedman.SGD(), 0.05), (SignSGD(), 0.002)):
        result = fedman.run(optimizer=optimizer, lr=lr, clients=10, participation=0.5, rounds=15, epochs=2)
        print(f"{optimizer}: accuracy {result.accuracy:.1f} %")
