"""A penalty of its own: that on confident predictions. Pereyra et al., 'Regularizing Neural Networks by Penalizing
Confident Output Distributions', 2017."""

from dataclasses import dataclass

import torch

import fedman


class Confidence:
    """−H(softmax(o)) of the outputs o in the latest forward pass of a model."""

    def __init__(self, model):
        self.output = None
        model.register_forward_hook(self.keep)

    def keep(self, model, inputs, output):
        self.output = output

    def terms(self, weight=None):
        log_p = torch.log_softmax(self.output, -1)
        each = (log_p.exp() * log_p).sum(-1)
        return {"confidence": each.mean() if weight is None else (weight * each).sum()}


@dataclass(frozen=True)
class ConfidencePenalty(fedman.Penalty):
    """ζ·Σ_c p_c log p_c, the mean over a batch: the smaller, the less certain the model is."""

    title = "CP"

    def attach(self, model):
        return Confidence(model)


if __name__ == "__main__":
    for zeta in (0.0, 0.5):
        result = fedman.run(
            penalty=ConfidencePenalty(zeta), clients=10, participation=0.5, rounds=15, epochs=2, lr=0.05
        )
        entropy = -result.rounds[-1]["penalty"]["confidence"]
        print(f"{result.summary['method']}: accuracy {result.accuracy:.1f} %, entropy while training {entropy:.2f}")
