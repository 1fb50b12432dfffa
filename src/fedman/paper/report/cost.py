"""What MAN costs: the paper's count of multiplications beside measured times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedman.data import SPECS
from fedman.models import build
from fedman.paper.report.series import Series
from fedman.paper.report.sources import StepCost
from fedman.paper.report.tables import Table


def layers(name: str, shape: Sequence[int], classes: int) -> list[tuple[str, int, int]]:
    """The multiplications for one sample forward, of every layer and of its MAN term.

    The paper's formula: C_o·H_o·W_o·C_i·K² or d_i·d_o of a layer's own, one more per output for MAN.
    """
    model = build(name, shape, classes)
    found = []

    def count(name: str, fan_in: int, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found.append((name, output[0].numel() * fan_in, output[0].numel()))

    for part, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(partial(count, part, math.prod(module.weight.shape[1:])))
    with torch.no_grad():
        model(torch.zeros(1, *shape))
    return found


def formula(dataset: str) -> Table | None:
    """The count for the model that goes with a data set."""
    spec = SPECS.get(dataset)
    if spec is None or len(spec.shape) != 3:
        return None  # the paper counts networks for images
    counted = layers(spec.model, spec.shape, spec.classes)
    total = "total", sum(own for _, own, _ in counted), sum(man for _, _, man in counted)
    rows = [[name, f"{own:,}", f"{man:,}", f"{100 * man / own:.2f} %"] for name, own, man in [*counted, total]]
    header = ["layer", "multiplications", "MAN adds", "share"]
    note = (
        "One sample forward: C_o·H_o·W_o·C_i·K² for a convolution, d_i·d_o for a linear layer; MAN adds one per output."
    )
    return Table(f"cost-{spec.model}", f"{spec.model}: the paper's count", header, rows, note)


def measured(costs: Iterable[StepCost]) -> Table:
    """Times of a training step, each against the plain step of the same measurement."""
    rows = [[c["where"], c["model"], c["kind"], f"{c['ms']:.3g}", f"{c['ratio']:.3f}"] for c in costs]
    header = ["where", "model", "step", "ms", "against plain"]
    note = "Medians of interleaved steps: forward, backward, update; SAM takes two gradients (benchmarks/man_cost.py)."
    return Table("cost-step", "Time of a training step, measured", header, rows, note, 3)


def runs(all_series: Sequence[Series]) -> Table:
    """Seconds per run, by data set, method and device; runs stacked on a GPU share their time evenly."""
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for s in all_series:
        for run in s.runs:
            if not s.changed and "diverged" not in run:
                beside = f", {run['stacked']} stacked" if run.get("stacked") else ""
                key = s.dataset, s.method, f"{run['device']}{beside}", run["precision"]
                groups.setdefault(key, []).append(run["seconds"])
    rows = [[*key, f"{sum(v) / len(v):.1f}", str(len(v))] for key, v in groups.items()]
    header = ["data", "method", "device", "precision", "s per run", "runs"]
    note = "Wall time, evaluations included. Runs that are stacked share their time evenly."
    return Table("cost-runs", "Time of a run", header, rows, note, 4)
