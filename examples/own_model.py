"""A model of its own: any `nn.Module`, given as it is, or made by a builder that the command line can name."""

import math

import torch
from torch import nn

import fedman


def gated(shape, outputs, width=48):
    """One hidden layer of gated linear units, for samples of any shape."""
    hidden = [nn.Linear(math.prod(shape), 2 * width), nn.GLU(), nn.GroupNorm(4, width)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, outputs))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = gated((1, 8, 8), 10)  # these weights are the start
    result = fedman.run(model=model, clients=10, participation=0.5, rounds=15, epochs=2, lr=0.05, zeta=0.05)
    print(result)
    model.load_state_dict(result.models["cloud"])
    digits = fedman.data.load("digits")
    images = torch.as_tensor(digits.x_test[:10, ..., 0]) / 255
    guessed = model((images[:, None] - digits.mean[0]) / digits.std[0]).argmax(1)
    print(f"test digits {digits.y_test[:10].tolist()} are taken for {guessed.tolist()}")
