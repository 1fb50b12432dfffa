"""Both sides of each bound in the chain from activation norms to λ_max, on a small network in float64.

Layer l maps its input a to z = W a. With M_i = ∂²L_i/∂z² at sample i, and samples that do not affect each other,

    FC     H_W = (1/B) Σ_i M_i ⊗ a_i a_iᵀ               so λ_max(H_W) ≤ (1/B) Σ_i λ_max(M_i) ‖a_i‖²
    conv   H_W = (1/B) Σ_i (I ⊗ U_i) M_i (I ⊗ U_i)ᵀ     so λ_max(H_W) ≤ (1/B) Σ_i λ_max(M_i) ‖U_i‖²

where the columns of U_i are the patches of a_i (for a linear layer on sequences: its rows). A pixel lies in at most k²
patches of a k×k kernel, so ‖U_i‖² ≤ k²‖a_i‖². Treating a convolution as one Kronecker product M̃_i ⊗ U_i U_iᵀ, with
M̃_i the mean over the positions of M_i's diagonal blocks, drops all that positions have to do with each other: the
bound (1/B) Σ_i λ_max(M̃_i) Σ_p ‖u_p‖² that follows is no bound (`LayerCheck.one_product`). If λ_max(M_i) < 0 the bounds
use 0: M ⊗ a aᵀ is singular. W is the layer's weight; its bias is another block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import hessian

from fedman.errors import UserError
from fedman.flatness.blocks import layers
from fedman.flatness.data import Loss
from fedman.flatness.operator import Hessian
from fedman.models.parameters import copy_of


@dataclass(frozen=True)
class Bound:
    """The statement left ≤ right with the measured values."""

    name: str
    left: float
    right: float

    @property
    def holds(self) -> bool:
        """Whether left ≤ right up to rounding."""
        return self.left <= self.right + 1e-9 * max(abs(self.left), abs(self.right))


@dataclass(frozen=True)
class LayerCheck:
    """One layer: its Hessian against the formula, and the bounds on its top eigenvalue.

    `identity` is ‖H − formula‖ / ‖H‖ (Frobenius), which is rounding error. `approximation` is the same for the formula
    of a convolution whose positions are treated as independent samples, H ≈ (1/B) Σ_i Σ_p M_i[p, p] ⊗ u_p u_pᵀ: 0 for
    a linear layer. The bounds do not use that approximation. `one_product` is what follows from one Kronecker product
    M̃ ⊗ U Uᵀ with the mean M̃ of the diagonal blocks M[p, p]; it can fail. None for a layer with one position. `constant`
    is the factor that mean ‖a‖² has in the bound: Σ λ_max(M_i) ‖a_i‖² / Σ ‖a_i‖².
    """

    name: str
    identity: float
    approximation: float
    bounds: list[Bound]
    one_product: Bound | None
    constant: float


@dataclass(frozen=True)
class Gershgorin:
    """Every eigenvalue of H lies in ∪_i [λ_min(H_ii) − R_i, λ_max(H_ii) + R_i] with R_i = Σ_{j≠i} ‖H_ij‖₂."""

    intervals: dict[str, tuple[float, float]]
    radii: dict[str, float]
    eigenvalues: Tensor
    top: Bound  # λ_max(H) ≤ max_i λ_max(H_ii) + R_i
    blocks: list[float]  # λ_max(H_ii): by interlacing none is above λ_max(H)

    @property
    def outside(self) -> int:
        """How many eigenvalues are in none of the intervals."""
        slack = 1e-9 * float(self.eigenvalues.abs().max())
        lows, highs = (torch.tensor(ends, dtype=torch.float64) for ends in zip(*self.intervals.values(), strict=True))
        inside = (self.eigenvalues[:, None] >= lows - slack) & (self.eigenvalues[:, None] <= highs + slack)
        return int((~inside.any(1)).sum())


def layer_check(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, name: str) -> LayerCheck:
    """The layer `name` (`Linear`, or `Conv2d` with one group and zero padding given as numbers) at the batch (x, y)."""
    model = copy_of(model).double().eval().requires_grad_(True)
    layer = dict(model.named_modules()).get(name)
    plain = (
        isinstance(layer, nn.Conv2d)
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )
    if layer is None or not (plain or isinstance(layer, nn.Linear)):
        known = [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        raise UserError(f"layer: {name!r} is no linear or plain conv layer of the model; those are {', '.join(known)}")
    x = x.double() if x.is_floating_point() else x
    exact = Hessian(model, loss, (x, y), parameters=[f"{name}.weight"], dtype=torch.float64).dense()
    formula, near = torch.zeros_like(exact), torch.zeros_like(exact)
    bounds, together, squares = torch.zeros(3, dtype=torch.float64), 0.0, 0.0
    for i in range(len(y)):
        a, outer = _around(model, layer, loss, x[i : i + 1], y[i : i + 1])
        patches = _patches(layer, a)
        o, p = outer.shape[:2]
        formula += torch.einsum("up,apbq,vq->aubv", patches, outer, patches).reshape_as(exact) / len(y)
        near += torch.einsum("up,apbp,vp->aubv", patches, outer, patches).reshape_as(exact) / len(y)
        top = torch.linalg.eigvalsh(outer.reshape(o * p, o * p))[-1].clamp(min=0)
        pixels = a.square().sum() * _overlap(layer)
        norms = torch.linalg.matrix_norm(patches, 2) ** 2, patches.square().sum(), pixels
        bounds += top * torch.stack(norms) / len(y)
        mean = torch.einsum("apbp->ab", outer) / p
        together += float(torch.linalg.eigvalsh(mean)[-1].clamp(min=0) * norms[1]) / len(y)
        squares += float(a.square().sum()) / len(y)
    left = float(torch.linalg.eigvalsh(exact)[-1])
    names = ("‖U‖²", "‖U‖² (Frobenius)", "k²‖a‖²")
    sides = [Bound(f"λ_max ≤ mean λ_max(M)·{n}", left, float(b)) for n, b in zip(names, bounds, strict=True)]
    one_product: Bound | None = Bound("λ_max ≤ mean λ_max(M̃)·‖U‖² (Frobenius)", left, together)
    if patches.shape[1] == 1:  # one position: the three are the same
        sides, one_product = [Bound("λ_max ≤ mean λ_max(M)·‖a‖²", left, float(bounds[1]))], None
    scale = exact.norm().clamp(min=torch.finfo(torch.float64).tiny)
    identity, approximation = (float((exact - other).norm() / scale) for other in (formula, near))
    constant = float(bounds[2] / (_overlap(layer) * squares)) if squares else 0.0
    return LayerCheck(name, identity, approximation, sides, one_product, constant)


def gershgorin(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Gershgorin:
    """Block-Gershgorin with the layers (weights and biases together) as blocks; for small models, since H is dense."""
    whole = Hessian(model, loss, (x, y), dtype=torch.float64)
    matrix = whole.dense()
    matrix = (matrix + matrix.T) / 2
    entries = whole.layout.unflatten(torch.arange(whole.size))
    rows = {layer: torch.cat([entries[n].flatten() for n in names]) for layer, names in layers(model).items()}
    intervals, radii, blocks = {}, {}, []
    for i, mine in rows.items():
        values = torch.linalg.eigvalsh(matrix[mine][:, mine])
        others = (matrix[mine][:, other] for j, other in rows.items() if j != i)
        radii[i] = sum(float(torch.linalg.matrix_norm(block, 2)) for block in others)
        intervals[i] = float(values[0]) - radii[i], float(values[-1]) + radii[i]
        blocks.append(float(values[-1]))
    eigenvalues = torch.linalg.eigvalsh(matrix)
    top = Bound("λ_max ≤ max λ_max(H_ll) + R_l", float(eigenvalues[-1]), max(high for _, high in intervals.values()))
    return Gershgorin(intervals, radii, eigenvalues, top, blocks)


def _around(model: nn.Module, layer: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """One sample's input of the layer, and M as `[o, p, o, p]`: outputs and positions."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        seen.extend((args[0].detach(), out.detach()))

    with layer.register_forward_hook(note):
        model(x)
    if len(seen) != 2:
        raise UserError(f"layer: called {len(seen) // 2} times in a forward pass; the theory is for layers called once")
    a, z = seen

    def after(z: Tensor) -> Tensor:
        with layer.register_forward_hook(lambda module, args, out: z):
            return loss(model(x), y)

    outer = hessian(after)(z).detach()
    if isinstance(layer, nn.Conv2d):
        return a, outer.reshape(z.shape[1], -1, z.shape[1], z[0, 0].numel())
    positions, outputs = z.numel() // z.shape[-1], z.shape[-1]
    return a, outer.reshape(positions, outputs, positions, outputs).permute(1, 0, 3, 2)


def _overlap(layer: nn.Module) -> int:
    """k²: in how many patches of the layer an entry of its input can lie."""
    return layer.weight[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1


def _patches(layer: nn.Module, a: Tensor) -> Tensor:
    """U of one sample: `[c·k², positions]` of a convolution, `[inputs, positions]` of a linear layer."""
    if not isinstance(layer, nn.Conv2d):
        return a.reshape(-1, a.shape[-1]).T
    return F.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride)[0]  # type: ignore[arg-type]
