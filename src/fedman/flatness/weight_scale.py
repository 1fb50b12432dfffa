"""The scale c of a perturbation of the weights: each entry moves in units of c."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedman.errors import UserError


def weight_scale(w: Tensor, rho: float, adaptive: bool) -> Tensor:
    """c `[P]`: |w| if adaptive (Kwon et al. 2021), which leaves weights at zero where they are, else 1.

    >>> weight_scale(torch.tensor([-2.0, 0.0, 1.0]), 0.1, adaptive=True)
    tensor([2., 0., 1.])
    """
    if not 0 < rho < math.inf:
        raise UserError(f"rho: {rho} is not a positive number")
    return w.abs() if adaptive else torch.ones_like(w)
