"""Parts of a Hessian: its diagonal blocks, one for each layer, and the clients' Hessians whose mean it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedman.errors import UserError
from fedman.flatness.data import Batches, Loss, call
from fedman.flatness.lanczos import eigenpairs
from fedman.flatness.operator import Hessian, Mean, Progress, select
from fedman.models.parameters import copy_of


def layers(model: nn.Module) -> dict[str, list[str]]:
    """Parameters by the module that owns them: {"convs.0": ["convs.0.weight", "convs.0.bias"], ...}."""
    groups: dict[str, list[str]] = {}
    for name in select(model).names:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return groups


def layer_hessians(model: nn.Module, loss: Loss, batches: Any, **options: Any) -> Iterator[tuple[str, Hessian]]:
    """The diagonal block of each layer, one at a time; `options` are `Hessian`'s."""
    for name, parameters in layers(model).items():
        yield name, Hessian(model, loss, batches, parameters=parameters, **options)


def input_norms(model: nn.Module, batches: Any, *, dtype: torch.dtype, batch_size: int | None) -> dict[str, float]:
    """The mean over samples of ‖a‖² by layer, a being the layer's input; only layers whose first input is a tensor."""
    device = next(model.parameters()).device
    data = Batches(batches, device=device, dtype=dtype, batch_size=batch_size)
    model = copy_of(model).to(dtype).eval()
    names = {module: name for name, module in model.named_modules() if name in layers(model)}
    totals: dict[str, Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            square = args[0].double().square().sum() / data.samples
            totals[names[module]] = totals.get(names[module], 0) + square

    for module in names:
        module.register_forward_pre_hook(note)
    with torch.no_grad():
        for _, x, _ in data:
            call(model, x)
    return {name: float(total) for name, total in totals.items()}


@dataclass(frozen=True)
class ClientBound:
    """λ_max((1/N) Σ_k H_k) ≤ (1/N) Σ_k λ_max(H_k): `top` ≤ `mean`, each client's λ_max, and the largest residual."""

    top: float
    mean: float
    clients: list[float]
    residual: float
    products: int


def client_eigenvalues(
    model: nn.Module,
    loss: Loss,
    clients: Sequence[Any],
    *,
    tol: float = 1e-4,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> ClientBound:
    """The top eigenvalue of every client's loss at one model, their mean, and that of the unweighted mean loss.

    `clients` holds each client's batches.
    """
    if not clients:
        raise UserError("clients: none given; at least one is needed")
    hessians = [Hessian(model, loss, batches, **options) for batches in clients]
    pairs = []
    for h in hessians:
        pairs.append(eigenpairs(h, 1, tol=tol, seed=seed))
        if progress is not None:
            progress(len(pairs), len(hessians))
    whole = eigenpairs(Mean(hessians), 1, tol=tol, seed=seed)
    values = [float(p.values[0]) for p in pairs]
    return ClientBound(
        top=float(whole.values[0]),
        mean=sum(values) / len(values),
        clients=values,
        residual=max(float(p.residuals[0]) for p in (*pairs, whole)),
        products=sum(h.products for h in hessians),
    )
