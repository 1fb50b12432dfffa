"""The model, the data of a node, training and testing."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedman.data import load


class Net(nn.Module):
    """Two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.flatten(1))


def loaders(partition: int, partitions: int) -> tuple[DataLoader, DataLoader]:
    """A node's own training and test samples: every `partitions`-th digit of the set in the package."""
    data = load("digits")
    sets = []
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        mine = slice(partition, None, partitions)
        pictures = torch.as_tensor(x[mine]).float().flatten(1) / float(x.max())
        sets.append(TensorDataset(pictures, torch.as_tensor(y[mine])))
    order = torch.Generator().manual_seed(partition)
    return DataLoader(sets[0], batch_size=32, shuffle=True, generator=order), DataLoader(sets[1], batch_size=256)


def train(model: nn.Module, loader: DataLoader, lr: float, criterion) -> float:
    """One epoch; the mean loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    total = 0.0
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader) -> float:
    """The share of right answers."""
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return right / len(loader.dataset)
