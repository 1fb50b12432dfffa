"""`fedman flatness --theory`: both sides of the paper's bounds on a CNN small enough for dense Hessians.

A federation of ten clients learns the embedded digits by FedAvg, once with MAN and once without. After its last round
every bound is evaluated in float64; every few rounds each layer's λ_max and the norm of its input are recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedman.config import Config, resolve
from fedman.data import Dataset, load, partition
from fedman.data.augment import channels_first, normalise
from fedman.flatness.blocks import client_eigenvalues, input_norms, layer_hessians
from fedman.flatness.lanczos import eigenpairs
from fedman.flatness.theory import Bound, gershgorin, layer_check
from fedman.models.convnet import ConvNet
from fedman.models.parameters import ParameterLayout
from fedman.runs.build import build
from fedman.training.aggregate import collect
from fedman.training.federation import Assignment
from fedman.training.round import Schedule

ZETA, CLIENTS, ROUNDS, EVERY = 0.15, 10, 40, 4
SAMPLES = 32  # of the dense Hessians
FOLLOWED = 256  # samples on which the layers are measured every few rounds
ROUNDING = 1e-9

Paths = dict[str, list[tuple[int, float, float]]]


@dataclass(frozen=True)
class Statement:
    """left ≤ right at one layer; if right is None, left is the error of an approximation, without a bound."""

    where: str
    about: str
    left: float
    right: float | None
    holds: bool | None


@dataclass(frozen=True)
class Demonstration:
    """For each run, the statements after its last round, and {layer: [(round, mean ‖a‖², λ_max), …]}."""

    statements: dict[str, list[Statement]]
    paths: dict[str, Paths]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The statements as header and rows, the runs side by side."""
        rows = [
            [f"{lines[0].where}: {lines[0].about}", *map(_sides, lines), _verdict(lines)]
            for lines in zip(*self.statements.values(), strict=True)
        ]
        return ["", *(f"{run}: left ≤ right (ratio)" for run in self.statements), ""], rows


def demonstrate(
    seed: int = 0, follow: Callable[[str, int, int], None] = lambda what, done, total: None
) -> Demonstration:
    """Train both federations and check the theory on them."""
    statements: dict[str, list[Statement]] = {}
    paths: dict[str, Paths] = {}
    for zeta in (0.0, ZETA):
        keys = {"clients": CLIENTS, "participation": 0.5, "cohort": "fixed", "rounds": ROUNDS}
        config = resolve({"dataset": "digits", "zeta": zeta, "seed": seed, **keys})
        data = load(config.dataset)
        x = channels_first(normalise(torch.as_tensor(data.x_train), data.mean, data.std, torch.float64)).contiguous()
        y = torch.as_tensor(data.y_train)
        path = paths[config.method] = {}
        seen = x[:FOLLOWED], y[:FOLLOWED]
        for t, model in _rounds(config, data):
            follow(f"{config.method}: round", t, ROUNDS)
            norms = input_norms(model, seen, dtype=torch.float64, batch_size=None)
            for name, block in layer_hessians(model, cross_entropy, seen, dtype=torch.float64):
                top = float(eigenpairs(block, 1).values[0])
                path.setdefault(name, []).append((t, norms[name], top))
        clients = partition.clients_of(data, config.partition, config.clients, seed=config.partition_seed)
        parts = [torch.as_tensor(part[:SAMPLES]) for part in clients]
        shares = [(x[part], y[part]) for part in parts]
        statements[config.method] = check(model, x[:SAMPLES], y[:SAMPLES], shares)
    return Demonstration(statements, paths)


def check(model: nn.Module, x: Tensor, y: Tensor, clients: list[tuple[Tensor, Tensor]]) -> list[Statement]:
    """Every statement of the theory at one model."""

    def bound(where: str, b: Bound) -> Statement:
        return Statement(where, b.name, b.left, b.right, b.holds)

    lines = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            found = layer_check(model, cross_entropy, x, y, name)
            conv = isinstance(module, nn.Conv2d)
            form = "mean (I⊗U) M (I⊗U)ᵀ" if conv else "mean M ⊗ a aᵀ"
            lines.append(Statement(name, f"‖H − {form}‖ / ‖H‖", found.identity, ROUNDING, found.identity <= ROUNDING))
            if conv:
                lines.append(Statement(name, "the same, positions independent", found.approximation, None, None))
            lines += [bound(name, b) for b in found.bounds]
    discs = gershgorin(model, cross_entropy, x, y)
    lines.append(bound("all layers", discs.top))
    lines.append(Statement("all layers", "eigenvalues outside all intervals", discs.outside, 0.0, not discs.outside))
    tops = client_eigenvalues(model, cross_entropy, clients, tol=1e-8, dtype=torch.float64)
    lines.append(bound(f"{len(clients)} clients", Bound("λ_max of the mean ≤ mean of λ_max", tops.top, tops.mean)))
    return lines


def _rounds(config: Config, data: Dataset) -> Iterator[tuple[int, nn.Module]]:
    """The mean of all clients' models, every few rounds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = ConvNet(data.shape, data.classes, (3, 4), kernel=3, padding=1, hidden=(8,))
    built = build([config], data, "cpu", model=model)
    (federation,), backend = built.federations, built.in_process
    schedule = Schedule(config.clients, config.participation, config.cohort, config.schedule_seed)
    state = federation.start()
    for t in range(config.rounds + 1):
        if t % EVERY == 0:
            mean = copy.deepcopy(model).double()
            mean.load_state_dict(ParameterLayout.of(model).unflatten(federation.models(state)["all"]))
            yield t, mean
        if t < config.rounds:
            now = [Assignment(federation, state, schedule.round(t, federation.training))]
            list(collect(now, backend.train(now, [])))


def _sides(line: Statement) -> str:
    """Both sides and their ratio as text."""
    if line.right is None:
        return f"{line.left:.3g}"
    ratio = f" ({line.left / line.right:.3f})" if line.right > ROUNDING else ""
    return f"{line.left:.3g} ≤ {line.right:.3g}{ratio}"


def _verdict(lines: Sequence[Statement]) -> str:
    if any(line.holds is None for line in lines):
        return "approximation"
    return "holds" if all(line.holds for line in lines) else "FAILS"
