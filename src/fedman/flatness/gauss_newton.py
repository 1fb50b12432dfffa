"""The Gauss-Newton matrix of a model's mean loss as a linear operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedman.errors import UserError
from fedman.flatness.data import call, map_tensors
from fedman.flatness.operator import Curvature, gradient, scalar, vector_jacobian


class Linearised(NamedTuple):
    """A batch's model and loss, each with a differentiable first derivative."""

    outputs: list[Tensor]  # z = model_w(x), connected to the weights
    seeds: list[Tensor]  # u, of the shapes of z
    transposed: Sequence[Tensor]  # Jᵀu, linear in u
    places: list[Tensor]  # z once more, connected to the loss alone
    slopes: Sequence[Tensor]  # ∇_z loss(z, y)


class GaussNewton(Curvature[Linearised]):
    """G = (1/n) Σ_i J_iᵀ H_i J_i with J_i = ∂model_w(x_i)/∂w and H_i = ∂²loss(z, y_i)/∂z² at the model's output z.

    G is the Hessian without the model's own curvature, H − G = (1/n) Σ_i Σ_c ∂loss/∂z_c ∇²_w z_c: the two are equal for
    a model that is linear in its weights, and close where the loss is small. It is positive semidefinite for a loss
    that is convex in the output; for the cross-entropy it is the Fisher matrix. `loss` must be a function of the
    output alone, which is a tensor, or a tuple or mapping of tensors; what it takes from the weights by another way is
    left out. A product is exact: Jv = ∂(Jᵀu·v)/∂u, then H(Jv) and Jᵀ(HJv) by backward passes. Arguments are those of
    `Curvature`.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    >>> with torch.no_grad():
    ...     _ = model[0].weight.fill_(2), model[1].weight.fill_(3)
    >>> data = torch.ones(1, 1), torch.zeros(1, 1)
    >>> GaussNewton(model, nn.functional.mse_loss, data).dense()  # z = ab, J = (b, a), H = 2
    tensor([[18., 12.],
            [12.,  8.]])
    """

    def _build(self, x: Any, y: Any) -> Linearised:
        outputs: list[Tensor] = []
        places: list[Tensor] = []

        def part(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            outputs.append(tensor)
            places.append(tensor.detach().requires_grad_())
            return places[-1]

        output = map_tensors(part, call(self.model, x))
        if not outputs:
            kind = type(output).__name__
            raise UserError(f"model: its output is a {kind}; a tensor, or a tuple or mapping of tensors, is needed")
        loss = scalar(self.loss(output, y))
        slopes = gradient([loss], places)
        seeds = [torch.zeros_like(z).requires_grad_() for z in outputs]
        live = [(z, u) for z, u in zip(outputs, seeds, strict=True) if z.requires_grad]
        transposed = gradient([z for z, _ in live], self.weights, [u for _, u in live])
        return Linearised(outputs, seeds, transposed, places, slopes)

    def _product(self, graph: Linearised, row: Sequence[Tensor]) -> Sequence[Tensor]:
        moved = vector_jacobian(graph.transposed, graph.seeds, row)  # Jv
        bent = vector_jacobian(graph.slopes, graph.places, moved)  # HJv
        return vector_jacobian(graph.outputs, self.weights, bent)  # JᵀHJv
